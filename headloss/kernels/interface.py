"""Interface of a kernel backend: its functions (*acts*), and the named tuples of their arguments.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, K stored tokens. `raw`
[n, v] are the logits of a matrix product, z = transform(raw), p = softmax(z) over the whole
vocabulary. An act returns a tile's statistics (a `SoftmaxState`) or the gradient of the logits:

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

Tiles and matrices have any row stride and unit stride along the row; memory between rows is never
touched. Vectors are contiguous, and float32 (float64 with float64 tiles) unless stated otherwise. n
may be 0. An act writes only arguments that its docstring names as outputs. No act waits for the
device: results are complete in the order of the stream.
"""
# pyright: reportReturnType=false
# A protocol's methods have a docstring in place of a body.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState, Statistics
from .pair import Chosen, Divergence, Pair, StoredTopk
from .transform import Transform


class Forward(NamedTuple):
    """Inputs of the statistics in addition to the logits."""

    targets: Tensor | None  # Columns [n] int64 of the whole vocabulary, some outside of the tile.
    # With None, which only `partials` accepts, no column is a target.
    first: int
    transform: Transform  # The temperature is a number or [n].
    needs: frozenset[str]  # Names of statistics.


class Backward(NamedTuple):
    """Inputs of the gradient in addition to the logits.

    Logits recomputed for the gradient may be rounded differently from the logits of the statistics.
    So the gradient at a target comes from `logps`, exact to the last digit of 1 - p, and a column
    of probability near 1 uses the normalizer's largest logit.
    """

    targets: Tensor  # Shape [n], int64.
    first: int
    transform: Transform
    normalizer: Normalizer  # Shape [n], of the whole vocabulary.
    coefficients: SoftmaxCoefficients  # Shape [n].
    logps: Tensor | None  # Targets' log-probs [n]; None without a term for the target.
    # Dtype of the gradient, not wider than the tile's dtype; None: equal.
    dtype: torch.dtype | None = None
    all_columns: bool = False  # The tile holds all columns, with the statistics' logits.

    def rows(self, rows: slice | Tensor) -> Backward:
        """Return the inputs of a subset of the tokens, for a gradient in the tile's dtype."""
        return Backward(
            self.targets[rows],
            self.first,
            self.transform.rows(rows),
            self.normalizer.rows(rows),
            self.coefficients.map(lambda t: t[rows]),
            None if self.logps is None else self.logps[rows],
            all_columns=self.all_columns,
        )


class ExpTile(NamedTuple):
    """Tile of *exp logits* exp(z - shift), stored in place of the logits z."""

    exp_logits: Tensor  # Shape [n, v]: bfloat16, or the hidden states' float32 or float64.
    shift: Tensor  # Logit of each token, [n]: the largest logit, or one not far below it.

    @classmethod
    def empty(cls, n: int, v: int, like: Tensor) -> ExpTile:
        """Return an uninitialized tile for hidden states `like`; rows are padded to 16 bytes."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        dtype = torch.bfloat16 if like.dtype.itemsize == 2 else wide
        exp_logits = like.new_empty(n, 8 * -(-v // 8), dtype=dtype)
        return cls(exp_logits[:, :v] if v % 8 else exp_logits, like.new_empty(n, dtype=wide))


def partials_of(fields: Sequence[Tensor], needs: frozenset[str]) -> SoftmaxState:
    """Return a `SoftmaxState` of the fields max_logit, sumexp_m1 and target, then entropy_sum if
    the entropy is needed, and logit_sum if the mean logit is needed."""
    max_logit, sumexp_m1, target, *more = fields
    entropy_sum = more[0] if "entropy" in needs else None
    logit_sum = more[-1] if "mean_logit" in needs else None
    return SoftmaxState(max_logit, sumexp_m1, target, entropy_sum, logit_sum)


class Measured(NamedTuple):
    """Statistics and softmax normalizer of tokens over the whole vocabulary."""

    stats: Statistics  # Shape [n] each.
    normalizer: Normalizer  # Shape [n].

    def rows(self, rows: slice | Tensor) -> Measured:
        """Return the statistics and normalizer of a subset of the tokens."""
        return Measured(self.stats.map(lambda t: t[rows]), self.normalizer.rows(rows))


class ShiftedSums(NamedTuple):
    """Sums of exp(z_j - shift) dz_j/draw_j w_j over a vocabulary slice, per token. The gradient of
    hidden states follows from the sums if c_target and c_prob are the only coefficients."""

    rows: Tensor  # Shape [n, H], float32.
    shift: Tensor  # Shape [n], float32.
    column: Tensor  # Column [n] int64 of the slice, left out of the sum.
    far: Tensor  # Bool [n]: True if the sum is invalid, because the shift is too small.


class LogitRows(NamedTuple):
    """Rows of packed tokens within a logits tensor, of any layout with unit stride along a row."""

    tensor: Tensor  # Shape [.., V].
    offsets: Tensor  # Start of each row in elements, [n] int64.
    aligned: bool  # Every offset is a multiple of 16.


class Walk(NamedTuple):
    """Arguments of one pass over existing logits, for statistics, a gradient, or both."""

    logits: LogitRows
    out: LogitRows | None  # Gradient in the logits' dtype; may be the logits. None: no gradient.
    live: Tensor | None  # Bool [n]; rows with False are not read, and have coefficients of 0.
    targets: Tensor  # Shape [n], int64.
    first: int
    transform: Transform
    needs: frozenset[str] | None  # Names of the statistics; None: read `normalizer`.
    coefficients: SoftmaxCoefficients | None = None  # Shape [n]; with `needs`, for entropy = 0.
    slopes: Tensor | None = None  # Closed-form dL/dlogp, `softmax.Slope` fields [parts, 5, n].
    normalizer: Normalizer | None = None  # Shape [n].


class Support(NamedTuple):
    """Support of each token's softmax: P pairs (token, column). A call handles only pairs whose
    column lies in the *window*, a range of vocabulary columns."""

    ids: Tensor  # Column [P] int64 of each pair in the whole vocabulary; below 0: no column.
    offsets: Tensor  # Shape [n + 1], int64, from 0: token t has ids[offsets[t]:offsets[t + 1]].
    first: int  # The window is columns [first, first + size).
    size: int


class Order(NamedTuple):
    """Row permutation: `rows[i]` is the source of output row i; from i = `count` on, rows are
    arbitrary."""

    rows: Tensor  # Shape [n], int64.
    count: Tensor  # Shape [1], int64.


class Sum(NamedTuple):
    """Contiguous float sum, to be scaled and rounded to a gradient."""

    value: Tensor
    dtype: torch.dtype  # The gradient's dtype.
    rows: Tensor | None = None  # Factor [n] float32 of each row of `value` [n, H].


class Acts(Protocol):
    """Functions that every backend implements, as a module returned by `kernels.load`."""

    # ------------------------------------------------------------------ a tile of logits

    def partials(
        self,
        raw: Tensor,
        forward: Forward,
        onto: SoftmaxState | None = None,
        without: Tensor | None = None,
    ) -> SoftmaxState:
        """Return statistics, [n] vectors, of raw [n, v] in float32, bfloat16, float16 (or float64).
        Only statistics in `needs` are computed. With `onto`, the tile is merged into the state
        `onto`, whose vectors may be reused. Columns `without` [n, K] int64 are left out of the
        sums, which keeps digits that 1 - sum would lose. With `without`, every target must lie
        outside of the tile."""

    def best(self, raw: Tensor, transform: Transform) -> tuple[SoftmaxState, Tensor]:
        """Return a tile's `SoftmaxState` without targets, and the column [n] int64 of each row's
        largest logit (the first such column for equal logits)."""

    def logit_gradient_(self, raw: Tensor, backward: Backward) -> Tensor:
        """Return dL/draw [n, v], written into the memory of `raw`; a narrower dtype fills row
        fronts."""

    def finish(self, slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
        """Return statistics over the whole vocabulary from the partial sums of W slices, merged in
        order; `slices` [W, 3 + .., n] is contiguous, with the fields of `partials_of`."""

    # ------------------------------------------------------------------ rows

    def scaled_rows(
        self, x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Return out[places] = x[:n] * scale by row, in float32 or wider and rounded once: x and
        out [.., H], scale [n] float32, places [n] int64, distinct, or None for the first n rows.
        `out` may be x; None makes a tensor of x's dtype."""

    def scaled(self, sums: Sequence[Sum], factor: Tensor | None) -> list[Tensor]:
        """Return each sum times its row factors (of one length) and `factor` [], in float32 or
        wider and rounded once to the gradient's dtype; in place where the value has that dtype."""

    # ------------------------------------------------------------------ a support

    def support_logits(
        self, x: Tensor, w: Tensor, support: Support, onto: Tensor | None = None
    ) -> Tensor:
        """Return the dot product x[token] . w[id - first] of each pair, [P]; 0 outside of the
        window. The result is float32 (float64 with float64 operands), or is added to `onto`.

        x [n, H] and w [size, H] may have any strides and differ in dtype.
        """

    def support_partials(self, raw: Tensor, support: Support, forward: Forward) -> SoftmaxState:
        """Return statistics [n] over the window, from the raw logits [P] of the pairs (token,
        column). A token without a pair in the window gets max_logit -inf and sumexp_m1 -1."""

    def support_gradient(self, raw: Tensor, support: Support, backward: Backward) -> Tensor:
        """Return dL/draw of each pair (token, column), [P]; 0 outside of the window."""

    def support_sums(
        self,
        values: Tensor,
        rows: Tensor,
        support: Support,
        out: Tensor,
        add: bool = False,
        uneven: bool = False,
    ) -> None:
        """Write to out [n, H], or `add` to `out`, each token's sum of values[pair] * rows[id -
        first] over pairs (token, column) in the window. The sum runs in order, in float32 or wider,
        and is rounded once. No row is read for a value of 0. The sums are the gradient of hidden
        states or, with tokens and columns exchanged, of the weight. The weight's pairs are
        `uneven`: few rows have most pairs, `first` is 0, and all pairs lie in the window."""

    # ------------------------------------------------------------------ pairs of tiles: see `pair`

    def divergence(self, raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
        """Return a tile's contribution to each divergence and to the divergence's mean slope, [n,
        K, 2]. `divergence.merge_shares` merges the tiles' log-acceptances."""

    def part_gradient_(
        self,
        raw: Tensor,
        part: Divergence | StoredTopk,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        """Return d part / d raw + extra [n, v], in new float32 (or float64) memory, or over
        `extra`. With the coefficients `others` of the remaining terms, write the whole gradient
        over raw, as `logit_gradient_` does; the two transforms may then differ in the temperature
        alone."""


class Kernels(Acts, Protocol):
    """Functions of the triton backend; a plan for the reference backend calls only those of
    `Acts`."""

    def fixed_product(
        self, a: Tensor, b: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """Return a [n, k] @ b [k, m], [n, m] in `dtype`, rounded once, or added to `out` [n, m]. b
        has any strides. Sums are in float32, in an order that depends neither on n nor on a row's
        place."""

    # ------------------------------------------------------------------ products that end in an act

    def can_fuse(self, x: Tensor, w: Tensor) -> bool:
        """Return True if the `product_` acts accept x and w; a `product_` act raises ValueError
        else."""

    def product_partials(
        self, x: Tensor, w: Tensor, forward: Forward, exp_tile: ExpTile | None = None
    ) -> SoftmaxState:
        """Return statistics of raw = x [n, H] @ w.T [H, v], both 16 bits wide, from float32 sums. A
        given `exp_tile` [n, v] receives the exp logits. The result's `max_logit` is a logit not far
        below the largest, or with `top1` the largest. `softmax.merge` and `softmax.finish` accept
        any shift."""

    def product_statistics(
        self,
        x: Tensor,
        w: Tensor,
        forward: Forward,
        vocabulary: int,
        exp_tile: ExpTile | None = None,
    ) -> Measured:
        """Return `softmax.finish` of the `product_partials` of all columns."""

    def product_gradient(self, x: Tensor, w: Tensor, backward: Backward) -> Tensor:
        """Return dL/draw of raw = x [n, H] @ w.T [H, v]: [n, v] in x's dtype, in new memory."""

    # ------------------------------------------------------------------ a narrow head

    def can_sweep(self, w: Tensor) -> bool:
        """Return True if the `narrow_` acts accept this weight on its device, with hidden states of
        its dtype and unit stride along H. Sums over the vocabulary are in float32, in an order
        independent of n."""

    def narrow_partials(
        self, x: Tensor, w: Tensor, forward: Forward, sums: bool = False
    ) -> tuple[SoftmaxState, ShiftedSums | None]:
        """Return statistics of raw = x [n, H] @ w.T [H, v], as `product_partials`. With `sums`,
        also return `ShiftedSums`, for n > 0 and operands other than float16."""

    def narrow_hidden(
        self, x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
    ) -> Tensor:
        """Return dL/draw @ w [n, H] in float32; dL/draw is rounded to w's dtype. If c_target and
        c_prob are the only coefficients, `sums` avoid a recomputation of logits; the normalizer
        must then be of the whole vocabulary."""

    def narrow_weight_(
        self,
        x: Tensor,
        w: Tensor,
        backward: Backward,
        out: Tensor | None,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Write dL/draw.T @ x * factor to `out` [v, H], rounded once, and the column sums of
        dL/draw to bias[:v] in float32, if given; dL/draw is rounded to x's dtype."""

    # ------------------------------------------------------------------ exp logits

    def exp_gradient_(
        self, exp_tile: ExpTile, backward: Backward, *, order: Order | None = None
    ) -> Tensor:
        """Return dL/draw [n, v], written over the exp logits. Under a soft cap, c_uniform must be
        absent, because z cannot be computed from an exp logit of 0. With `order`, row i is the
        gradient of row order.rows[i], and rows from order.count on are arbitrary."""

    def exp_multiple_(
        self,
        exp_tile: ExpTile,
        backward: Backward,
        *,
        x: Tensor | None = None,
        order: Order | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return s [n] with dL/draw = s * e for exp logits e, after a change of e at the target.
        c_target and c_prob must be the only coefficients, without a soft cap. |s| is not far below
        `least` [n], the size of the values that a later step adds to each row. The second result is
        s * x of x [n, H], in float32 or wider and rounded once. With `order`, row i of e, s and s *
        x is computed from row order.rows[i]; rows from order.count on are arbitrary."""

    # ------------------------------------------------------------------ chosen columns

    def chosen_logits(self, x: Tensor, w: Tensor, columns: Tensor, transform: Transform) -> Tensor:
        """Return z [n, K] of raw = x [n, H] @ w.T [H, v] at columns [n, K] int64, in float32 or
        wider; 0 for a column outside of [0, v)."""

    def chosen_gradient_(
        self,
        tile: Tensor,
        chosen: Chosen,
        backward: Backward,
        *,
        multiples: Tensor | None = None,
        order: Order | None = None,
    ) -> None:
        """Overwrite dL/draw at chosen columns of a gradient tile [n, v] with the sum of all parts,
        computed from log-probs and so accurate to the digits of 1 - p. With `multiples` [n], row i
        of the tile holds dL/draw over multiples[i]. `order` is as in `exp_gradient_`."""

    # ------------------------------------------------------------------ rows

    def dense_order(self, keep: Tensor, most: int) -> Order:
        """Return a row order in which the rows kept by `keep` [n] bool come first.

        Of c kept rows, those with an index below c stay in place, and kept rows from index c on
        fill the gaps: GPU programs in any order never read a row that is already overwritten. With
        more than `most` kept rows, no row moves, and `count` is n.
        """

    # ------------------------------------------------------------------ logits where they lie

    def given_rows(self, walk: Walk) -> SoftmaxState | None:
        """Return the statistics of given logits and write the gradient to `out`, or do one of the
        two.

        Rows that are not `live` get statistics and gradients of 0. Given both `needs` and `out`,
        the call adds the entropy's gradient and `slopes` to the coefficients before it writes the
        gradient.
        """

    def scale_rows_(self, rows: LogitRows, factor: Tensor) -> None:
        """Multiply rows in place by factor [], in float32 or wider, rounded once; 1 does
        nothing."""
