"""Acts of a backend (the functions that a backend implements) and the acts' records.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, K stored tokens. `raw`
[n, v] are the logits of a product, z = transform(raw), p = softmax(z) over the whole vocabulary.
Acts return the statistics of a tile, a `SoftmaxState`, or the gradient of its logits:

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

Tiles and matrices have any row stride and unit stride along the row; memory next to their columns
is never touched. Vectors are contiguous, and float32 (float64 with float64 tiles) unless stated
otherwise. n may be 0. An act writes only arguments that its docstring names as outputs. No act
waits for the device: results are complete in the order of the stream.
"""
# pyright: reportReturnType=false
# An act's docstring is its whole body here.

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

    Recomputed logits may be rounded differently from the first logits, to which the statistics
    belong. The gradient at a target follows from `logps`, exact to the last digit of (1 - p). A
    column with nearly all the mass has the normalizer's largest logit.
    """

    targets: Tensor  # Shape [n], int64.
    first: int
    transform: Transform
    normalizer: Normalizer  # Shape [n], of the whole vocabulary.
    coefficients: SoftmaxCoefficients  # Shape [n].
    logps: Tensor | None  # Targets' log-probs [n]; None without a term for the target.
    dtype: torch.dtype | None = None  # Gradient's dtype, not wider than the tile's; None: equal.
    all_columns: bool = False  # The tile has the vocabulary's columns and the statistics' logits.

    def rows(self, rows: slice | Tensor) -> Backward:
        """Return the inputs of some of the tokens; the gradient has the tile's dtype."""
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
    """Exp logits exp(z - shift) of some tokens, in place of their logits."""

    exp_logits: Tensor  # Shape [n, v]: bfloat16, or the hidden states' float32 or float64.
    shift: Tensor  # A logit of each token, [n]: the largest, or not far below the largest.

    @classmethod
    def empty(cls, n: int, v: int, like: Tensor) -> ExpTile:
        """Return memory for exp logits of a tensor like `like`; rows have whole 16 bytes."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        dtype = torch.bfloat16 if like.dtype.itemsize == 2 else wide
        exp_logits = like.new_empty(n, 8 * -(-v // 8), dtype=dtype)
        return cls(exp_logits[:, :v] if v % 8 else exp_logits, like.new_empty(n, dtype=wide))


def partials_of(fields: Sequence[Tensor], needs: frozenset[str]) -> SoftmaxState:
    """Return the state with these fields: max_logit, sumexp_m1, target, then entropy_sum where the
    entropy is needed and logit_sum where the mean logit is needed."""
    max_logit, sumexp_m1, target, *more = fields
    entropy_sum = more[0] if "entropy" in needs else None
    logit_sum = more[-1] if "mean_logit" in needs else None
    return SoftmaxState(max_logit, sumexp_m1, target, entropy_sum, logit_sum)


class Measured(NamedTuple):
    """The statistics of some tokens over the whole vocabulary."""

    stats: Statistics  # Shape [n] each.
    normalizer: Normalizer  # Shape [n].

    def rows(self, rows: slice | Tensor) -> Measured:
        """Return the measurement of some of the tokens."""
        return Measured(self.stats.map(lambda t: t[rows]), self.normalizer.rows(rows))


class ShiftedSums(NamedTuple):
    """Sums of exp(z_j - shift) dz_j/draw_j w_j by token, over a slice of the vocabulary: the hidden
    gradient of c_target and c_prob follows from these sums."""

    rows: Tensor  # Shape [n, H], float32.
    shift: Tensor  # Shape [n], float32.
    column: Tensor  # Column [n] int64 of the slice that the sum leaves out.
    far: Tensor  # Bool [n]: the shift is far below the largest logit, and the sum invalid.


class LogitRows(NamedTuple):
    """The packed tokens' rows in a tensor of any layout with unit stride along the vocabulary."""

    tensor: Tensor  # Shape [.., V].
    offsets: Tensor  # Start of each row in elements, [n] int64.
    aligned: bool  # Every offset is a multiple of 16.


class Walk(NamedTuple):
    """One pass over rows of existing logits: statistics, a gradient, or both."""

    logits: LogitRows
    out: LogitRows | None  # Gradient in the logits' dtype; may be the logits. None: no gradient.
    live: Tensor | None  # Bool [n]; rows with False are not read, and have coefficients of 0.
    targets: Tensor  # Shape [n], int64.
    first: int
    transform: Transform
    needs: frozenset[str] | None  # Wanted statistics; None: `normalizer` is given.
    coefficients: SoftmaxCoefficients | None = None  # Shape [n]; with `needs`, for entropy = 0.
    slopes: Tensor | None = None  # With `needs`: further dL/dlogp [parts, 5, n], `softmax.Slope`.
    normalizer: Normalizer | None = None  # Shape [n].


class Support(NamedTuple):
    """Columns of the softmax of each of n tokens: P pairs of a token and a column, of which only
    pairs in a window of the vocabulary count here."""

    ids: Tensor  # Columns [P] int64 of the whole vocabulary; below 0: an empty slot.
    offsets: Tensor  # Shape [n + 1], int64, from 0: token t has ids[offsets[t]:offsets[t + 1]].
    first: int  # The window is columns [first, first + size).
    size: int


class Order(NamedTuple):
    """Source row of each place. Places from `count` on hold arbitrary rows."""

    rows: Tensor  # Shape [n], int64.
    count: Tensor  # Shape [1], int64.


class Sum(NamedTuple):
    """A contiguous sum that becomes a gradient."""

    value: Tensor
    dtype: torch.dtype  # The gradient's dtype.
    rows: Tensor | None = None  # Factors [n] float32 of the rows of the value [n, H].


class Acts(Protocol):
    """Acts of every backend. Each module that `kernels.load` returns implements `Acts`."""

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
        `onto`, whose vectors may be reused. `without` [n, K] int64 leaves columns out, some perhaps
        outside of the tile, where all targets must be: such sums keep digits that 1 - sum would
        lose.
        """

    def best(self, raw: Tensor, transform: Transform) -> tuple[SoftmaxState, Tensor]:
        """Return the state of a tile without a target, and the column [n] int64 of each row's
        largest logit: of equal logits the first."""

    def logit_gradient_(self, raw: Tensor, backward: Backward) -> Tensor:
        """Return dL/draw [n, v], over `raw`, or with `dtype` in the front of each row of `raw`."""

    def finish(self, slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
        """Return statistics from partials of W slices of a vocabulary of this size, in the slices'
        order: slices [W, 3 + .., n], contiguous, fields as in `partials_of`."""

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
        """Return [P] x[token] . w[id - first] of pairs in the window, else 0, in float32 or wider,
        as float32 (float64 with float64 operands). With `onto`, add to `onto`.

        x [n, H] and w [size, H] may have any strides and differ in dtype.
        """

    def support_partials(self, raw: Tensor, support: Support, forward: Forward) -> SoftmaxState:
        """Return statistics [n] of pairs in the window, from raw logits [P]; both `first` fields
        agree. A token without pairs is an empty slice: max_logit -inf, sumexp_m1 -1."""

    def support_gradient(self, raw: Tensor, support: Support, backward: Backward) -> Tensor:
        """Return dL/draw of each pair [P], 0 outside of the window."""

    def support_sums(
        self,
        values: Tensor,
        rows: Tensor,
        support: Support,
        out: Tensor,
        add: bool = False,
        uneven: bool = False,
    ) -> None:
        """Write out [n, H] = sum of values [P] * rows[id - first] over each token's pairs in the
        window, in the pairs' order, in float32 or wider and rounded once; with `add`, add to `out`.
        Rows whose value is 0 are not read. The sums are the gradient of hidden states; with tokens
        and columns exchanged, the gradient of a weight, whose pairs are `uneven`: rows differ much
        in their number of pairs, `first` is 0, and all pairs lie in the window."""

    # ------------------------------------------------------------------ pairs of tiles: see `pair`

    def divergence(self, raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
        """Return [n, K, 2]: a tile's shares of each divergence and of its mean slope. The
        log-acceptance is within the tile; `divergence.merge_shares` merges tiles."""

    def part_gradient_(
        self,
        raw: Tensor,
        part: Divergence | StoredTopk,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        """Return d part / d raw + extra [n, v], in new float32 (or float64) memory, or over
        `extra`. With `others`, the objective's remaining terms, return the whole gradient over raw,
        as in `logit_gradient_`; the transforms of both parts differ in the temperature alone."""


class Kernels(Acts, Protocol):
    """Acts that only the triton backend has: no plan asks the reference backend for these acts."""

    def fixed_product(
        self, a: Tensor, b: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """Return a [n, k] @ b [k, m], [n, m] in `dtype`, rounded once, or added to `out` [n, m].

        b has any strides. Sums are in float32, in an order that depends neither on n nor on a row's
        place.
        """

    # ------------------------------------------------------------------ products that end in an act

    def can_fuse(self, x: Tensor, w: Tensor) -> bool:
        """Return True if the `product_` acts accept x and w, else these acts raise ValueError."""

    def product_partials(
        self, x: Tensor, w: Tensor, forward: Forward, exp_tile: ExpTile | None = None
    ) -> SoftmaxState:
        """Return statistics of raw = x [n, H] @ w.T [H, v], both 16 bits wide, from float32 sums.

        `exp_tile` [n, v] is filled. `max_logit` is the shift of both sums of exponentials: a logit
        not far below the largest logit, or with `top1` the largest. `softmax.merge` and
        `softmax.finish` accept any shift.
        """

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
        """Return dL/draw @ w [n, H] in float32; dL/draw is rounded to w's dtype. For c_target and
        c_prob alone, `sums` are enough; the normalizer is then the whole vocabulary's."""

    def narrow_weight_(
        self,
        x: Tensor,
        w: Tensor,
        backward: Backward,
        out: Tensor | None,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Write out [v, H] = dL/draw.T @ x * factor [], rounded once, and bias[:v] = the column
        sums of dL/draw in float32, each if given; dL/draw is rounded to x's dtype."""

    # ------------------------------------------------------------------ exp logits

    def exp_gradient_(
        self, exp_tile: ExpTile, backward: Backward, *, order: Order | None = None
    ) -> Tensor:
        """Return dL/draw [n, v], written over the exp logits in their dtype, for any coefficients
        but c_uniform under a soft cap, where an exp logit of 0 does not tell z. With `order`, row i
        is the gradient of row order.rows[i], and rows from `count` on hold any values."""

    def exp_multiple_(
        self,
        exp_tile: ExpTile,
        backward: Backward,
        *,
        x: Tensor | None = None,
        order: Order | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return s [n] such that dL/draw = s e, for c_target and c_prob alone without a soft cap;
        the targets' e are overwritten to fit.

        `least` [n] is the size of values that a row will still receive: s must not be far below
        that size.

        The second result is s * x of x [n, H], in float32 or wider and rounded once. With `order`,
        row i of e, s and s * x is that of row order.rows[i], and rows from `count` on hold any
        values.
        """

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
        """Set dL/draw of the chosen columns in the gradient's tile [n, v]: the terms of
        coefficients, target and slopes, from log-probs and so to the digits of 1 - p.

        With `multiples` [n], row i of the tile holds dL/draw over multiples[i]. `order` is as in
        `exp_gradient_`.
        """

    # ------------------------------------------------------------------ rows

    def dense_order(self, keep: Tensor, most: int) -> Order:
        """Return the source row of each place, such that the rows of keep [n] bool come first.

        A kept row below the number of kept rows stays in place; further kept rows fill the gaps. No
        program reads a row that another program has written, in any order of programs. With more
        than `most` kept rows, no row moves, and `count` is n.
        """

    # ------------------------------------------------------------------ logits where they lie

    def given_rows(self, walk: Walk) -> SoftmaxState | None:
        """Return each row's statistics, then write its gradient to `out`; either may be left out.

        Statistics and gradients of rows that are not live are 0. A call for both steps adds the
        entropy's part and `slopes` to the coefficients in between.
        """

    def scale_rows_(self, rows: LogitRows, factor: Tensor) -> None:
        """Multiply rows by factor [], in float32 or wider, rounded once; skip a factor of 1."""
