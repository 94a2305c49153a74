"""Interface of a kernel backend: its functions, and named tuples of the functions' arguments.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, K columns of a token.
`raw` [n, v] are the logits of a matrix product, z = transform(raw), p = softmax(z) over the whole
vocabulary. Forward functions return a tile's statistics, a `SoftmaxState`. Gradient functions
return, for target y and gradient coefficients c_target, c_prob, c_entropy and c_uniform, dL/dz_j =
c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform with p = softmax(z).

Tiles and matrices have any row stride and unit stride along the row; memory between rows is never
touched. Vectors are contiguous, and float32 (float64 with float64 tiles) unless stated otherwise. n
may be 0. A backend's function writes only to arguments that its docstring names as outputs. No
backend function waits for the device: results are complete in the order of the CUDA stream.
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
    """Inputs of the kernels for the statistics, in addition to the logits."""

    targets: Tensor | None  # Target ids [n] int64, which may lie outside of the tile.
    # Target ids may be None only for the function `partials`.
    first: int
    transform: Transform  # The temperature is one number, or one number per token, [n].
    needs: frozenset[str]  # Names of statistics.


class Backward(NamedTuple):
    """Inputs of the kernels for the gradient of the logits, in addition to the logits.

    The backward pass may round recomputed logits differently from the forward pass. At a target of
    probability p near 1, the gradient needs an exact 1 - p, computed from `logps`. A kernel may
    replace a recomputed logit of probability near 1 by the forward pass's largest logit.
    """

    targets: Tensor  # Shape [n], int64.
    first: int
    transform: Transform
    normalizer: Normalizer  # Softmax normalizer over the whole vocabulary, [n].
    coefficients: SoftmaxCoefficients  # Shape [n].
    logps: Tensor | None  # Log-probs [n] of the targets; None if `coefficients.target` is None.
    # Dtype of the gradient, at most as wide as the tile's dtype; None: the tile's dtype.
    dtype: torch.dtype | None = None
    all_columns: bool = False  # True: the tile has all columns, as in the forward pass.

    def rows(self, rows: slice | Tensor) -> Backward:
        """Return the inputs restricted to the tokens `rows`, without the field `dtype`."""
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

    exp_logits: Tensor  # Exponentials [n, v]: bfloat16, or float32/float64 like the hidden states.
    shift: Tensor  # Largest logit of each token, or a logit not far below it, [n].

    @classmethod
    def empty(cls, n: int, v: int, like: Tensor) -> ExpTile:
        """Return an uninitialized tile [n, v] whose dtypes suit the hidden states `like`. Each row
        of the tile is padded to a multiple of 16 bytes."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        dtype = torch.bfloat16 if like.dtype.itemsize == 2 else wide
        exp_logits = like.new_empty(n, 8 * -(-v // 8), dtype=dtype)
        return cls(exp_logits[:, :v] if v % 8 else exp_logits, like.new_empty(n, dtype=wide))


def partials_of(fields: Sequence[Tensor], needs: frozenset[str]) -> SoftmaxState:
    """Return a `SoftmaxState` from tensors in this order: `max_logit`, `sumexp_m1`, `target`,
    `entropy_sum` if the entropy is needed, and `logit_sum` if the mean logit is needed."""
    max_logit, sumexp_m1, target, *more = fields
    entropy_sum = more[0] if "entropy" in needs else None
    logit_sum = more[-1] if "mean_logit" in needs else None
    return SoftmaxState(max_logit, sumexp_m1, target, entropy_sum, logit_sum)


class Measured(NamedTuple):
    """Statistics and softmax normalizer of tokens over the whole vocabulary."""

    stats: Statistics  # Shape [n] each.
    normalizer: Normalizer  # Shape [n].

    def rows(self, rows: slice | Tensor) -> Measured:
        """Return the statistics and the softmax normalizer of the tokens `rows` alone."""
        return Measured(self.stats.map(lambda t: t[rows]), self.normalizer.rows(rows))


class ShiftedSums(NamedTuple):
    """Per-token sum over a slice's vocabulary columns j: exp(z_j - shift) times the derivative of
    the logit z_j by its raw logit, times weight row j. If the loss depends only on the target's
    logit and the log-sum-exp, the hidden gradient is computed from the field `rows`."""

    rows: Tensor  # Shape [n, H], float32.
    shift: Tensor  # Shape [n], float32.
    column: Tensor  # Int64 [n]: the sum rows[t] leaves out column[t], a column of the slice.
    far: Tensor  # Bool [n]: True if rows[t] is invalid, as a logit of token t far exceeds shift[t].


class LogitRows(NamedTuple):
    """Rows of packed tokens within a logits tensor, of any layout with unit stride along a row."""

    tensor: Tensor  # Shape [.., V].
    offsets: Tensor  # Start of each row in the tensor's memory, in elements, [n] int64.
    aligned: bool  # True if every row's offset is a multiple of 16 elements.


class Walk(NamedTuple):
    """Arguments of one pass over the caller's logits, for statistics, a gradient, or both."""

    logits: LogitRows
    out: LogitRows | None  # Memory of the gradient, which may be `logits`; None: no gradient.
    live: Tensor | None  # Bool [n]; a row with False is not read, and has coefficients of 0.
    targets: Tensor  # Shape [n], int64.
    first: int
    transform: Transform
    needs: frozenset[str] | None  # Statistics to compute; None if `normalizer` is given.
    coefficients: SoftmaxCoefficients | None = None  # Gradient coefficients, [n] each.
    slopes: Tensor | None = None  # The 5 numbers that define each of P derivatives, [P, 5, n].
    normalizer: Normalizer | None = None  # Shape [n].


class Support(NamedTuple):
    """Allowed ids of each token's softmax, as P pairs (token, column). A kernel call handles only
    pairs (token, column) whose column lies in the *window*, a range of vocabulary columns."""

    ids: Tensor  # Vocabulary column [P] int64 of each pair; a negative number stands for no column.
    offsets: Tensor  # Int64 [n + 1], offsets[0] = 0: token t has ids[offsets[t]:offsets[t + 1]].
    first: int  # First vocabulary column of the window of `size` columns.
    size: int


class Order(NamedTuple):
    """Permutation of a tile's rows: for each i < count, output row i is computed from input row
    rows[i]. The output rows `count` and above hold arbitrary values."""

    rows: Tensor  # Shape [n], int64.
    count: Tensor  # Shape [1], int64.


class Sum(NamedTuple):
    """Contiguous float tensor that is scaled and rounded to become a gradient."""

    value: Tensor
    dtype: torch.dtype  # The gradient's dtype.
    rows: Tensor | None = None  # Factors [n] float32 for the rows of `value` [n, H].


class Acts(Protocol):
    """Functions that every backend's module implements; `kernels.load` returns the module."""

    def partials(
        self,
        raw: Tensor,
        forward: Forward,
        onto: SoftmaxState | None = None,
        without: Tensor | None = None,
    ) -> SoftmaxState:
        """Return statistics, [n] vectors, of raw [n, v] in float32, bfloat16, float16 (or float64).
        Only statistics in `needs` are computed. With `onto`, the result is the tile's state merged
        with the online-softmax state `onto`, whose memory may be reused. The columns `without` [n,
        K] int64 do not enter the statistics, which is more accurate than to subtract their terms
        afterwards. If `without` leaves columns out, no target may lie in the tile of logits."""

    def best(self, raw: Tensor, transform: Transform) -> tuple[SoftmaxState, Tensor]:
        """Return a tile's `SoftmaxState` without targets, and the column [n] int64 of each row's
        largest logit (the first such column for equal logits)."""

    def logit_gradient_(self, raw: Tensor, backward: Backward) -> Tensor:
        """Return the gradient of the raw logits [n, v], written into the memory of `raw`. A
        gradient of a dtype narrower than that of `raw` fills only the first bytes of each row."""

    def finish(self, slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
        """Return statistics over the whole vocabulary from the partial sums of W slices, merged in
        order; `slices` [W, 3 + .., n] is contiguous, with the fields of `partials_of`."""

    # ------------------------------------------------------------------ rows

    def scaled_rows(
        self, x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Write row i of x [.., H] times scale[i] (float32 [n]), in float32 or wider and rounded
        once, to row places[i] of `out` [.., H], and return `out`. `places` [n] int64 are distinct;
        None: the first n rows. `out` may be `x`; None: a new tensor of the dtype of `x`."""

    def scaled(self, sums: Sequence[Sum], factor: Tensor | None) -> list[Tensor]:
        """Return each gradient sum times the scalar `factor` and the sum's row factors, in float32
        or wider, rounded to the gradient's dtype. Gradient sums with row factors (`Sum.rows`) have
        the same number of rows. A gradient sum in the gradient's dtype is changed in place."""

    # ------------------------------------------------------------------ allowed ids of each token

    def support_logits(
        self, x: Tensor, w: Tensor, support: Support, onto: Tensor | None = None
    ) -> Tensor:
        """Return the dot product x[token] . w[id - first] of each pair (token, id), [P]; 0 for an
        id outside of [first, first + size). The result is in float32 (float64 for float64
        operands); if `onto` [P] is given, the dot products are added to `onto`. The operands x [n,
        H] and w [size, H] may have any strides and differ in dtype."""

    def support_partials(self, raw: Tensor, support: Support, forward: Forward) -> SoftmaxState:
        """Return statistics [n] of each token's softmax over its columns in [first, first + size),
        from the raw logits [P] of the pairs (token, column). A token without a column in [first,
        first + size) gets max_logit -inf and sumexp_m1 -1."""

    def support_gradient(self, raw: Tensor, support: Support, backward: Backward) -> Tensor:
        """Return the gradient of the raw logit of each pair (token, column), [P]; 0 for a column
        outside of [first, first + size)."""

    def support_sums(
        self,
        values: Tensor,
        rows: Tensor,
        support: Support,
        out: Tensor,
        add: bool = False,
        uneven: bool = False,
    ) -> None:
        """Write to (or `add` to) each row out[token], of H elements, the sum of values[pair] *
        rows[id - support.first] over the token's pairs (token, id) with 0 <= id - support.first <
        support.size. Each token's products are added in the order of its ids, in float32 or wider;
        the sum is rounded once. For a 0 in `values`, no row of `rows` is read. `support_sums`
        computes the gradient of the hidden states or, with tokens and columns exchanged, of the
        weight. Pass uneven=True if most pairs belong to a few rows of `out`, `support.first` is 0,
        and all ids are below `support.size`."""

    # ------------------------------------------------------------------ pairs of tiles: see `pair`

    def divergence(self, raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
        """Return a tile's contributions [n, K, 2] to K divergences and to the sums, over columns j,
        of the student's p_j times the divergence's derivative in p_j. `divergence.merge_shares`
        merges several tiles' contributions to log sum_j min(p_j, q_j), for the teacher's q."""

    def part_gradient_(
        self,
        raw: Tensor,
        part: Divergence | StoredTopk,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        """Return the gradient of `part` (divergences or stored top-k teacher log-probs) with
        respect to the raw logits, in float32 (or float64). If `extra` [n, v] is given, the gradient
        is added to `extra` in place. If `others` (inputs of the loss terms without a teacher) is
        given, the gradient of the whole loss overwrites the raw logits. Loss terms with and without
        a teacher may differ in temperature, but not in scale or soft cap."""


class Kernels(Acts, Protocol):
    """Functions of the triton backend; the reference backend implements only the class `Acts`."""

    def fixed_product(
        self, a: Tensor, b: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """Return the product a [n, k] @ b [k, m] (of any strides), rounded once to `dtype`, or
        added to `out` [n, m]. Each row is summed in float32, in one order for all row counts."""

    # ------------------------------------------------------------------ matmuls with an epilogue

    def can_fuse(self, x: Tensor, w: Tensor) -> bool:
        """Return False if functions named `product_..` raise ValueError for operands x and w."""

    def product_partials(
        self, x: Tensor, w: Tensor, forward: Forward, exp_tile: ExpTile | None = None
    ) -> SoftmaxState:
        """Return statistics of the raw logits x [n, H] @ w.T [H, v], from float32 sums of 16-bit
        operands. If given, `exp_tile` [n, v] receives exp(z - shift) of the logits z. The result's
        `max_logit` is not far below the token's largest logit, and equal if `top1` is needed."""

    def product_statistics(
        self,
        x: Tensor,
        w: Tensor,
        forward: Forward,
        vocabulary: int,
        exp_tile: ExpTile | None = None,
    ) -> Measured:
        """Return statistics over the whole vocabulary: `softmax.finish` of `product_partials`."""

    def product_gradient(self, x: Tensor, w: Tensor, backward: Backward) -> Tensor:
        """Return the gradient of the raw logits x [n, H] @ w.T [H, v], in new memory [n, v] of the
        dtype of x."""

    # ------------------------------------------------------------------ a head with a small H

    def can_sweep(self, w: Tensor) -> bool:
        """Return True if the functions with the prefix `narrow_` accept the weight w on its device,
        with hidden states of the dtype of w and unit stride along H. Every `narrow_` function sums
        over the vocabulary in float32, in the same order for every number n of tokens."""

    def narrow_partials(
        self, x: Tensor, w: Tensor, forward: Forward, sums: bool = False
    ) -> tuple[SoftmaxState, ShiftedSums | None]:
        """Return statistics of the raw logits x [n, H] @ w.T [H, v], as `product_partials` does,
        and a `ShiftedSums`, from which `narrow_hidden` computes the gradient of the hidden states.
        The `ShiftedSums` is None if `sums` is False, n is 0 or x is float16."""

    def narrow_hidden(
        self, x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
    ) -> Tensor:
        """Return the gradient of the hidden states, dL/draw @ w [n, H] in float32, where dL/draw
        (the gradient of the raw logits) is rounded to the dtype of w. If `sums` (the `ShiftedSums`
        of the forward pass) is given, the hidden gradient is computed without the logits; the loss
        must then depend only on the target's logit and the log-sum-exp."""

    def narrow_weight_(
        self,
        x: Tensor,
        w: Tensor,
        backward: Backward,
        out: Tensor | None,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Write the weight's gradient, factor * G.T @ x, to `out` [v, H], rounded once, where G is
        the gradient of the raw logits in the dtype of x. If `bias` is given, write the sums of the
        raw logits' gradient over tokens to bias[:v], in float32."""

    # ------------------------------------------------------------------ exp logits

    def exp_gradient_(
        self, exp_tile: ExpTile, backward: Backward, *, order: Order | None = None
    ) -> Tensor:
        """Return the gradient of the raw logits [n, v], written over `exp_tile`. With a soft cap,
        the gradient must have no constant part (c_uniform is None): the soft cap's derivative needs
        z, which is lost where exp(z - shift) underflows to 0. With `order`, row i of the result is
        the gradient of row order.rows[i], and result rows from order.count on are arbitrary."""

    def exp_multiple_(
        self,
        exp_tile: ExpTile,
        backward: Backward,
        *,
        x: Tensor | None = None,
        order: Order | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return factors [n], where factors[i] times row i of `exp_tile`, exp(z - shift), is the
        gradient of the raw logits of token i. The call overwrites each token's target column in
        `exp_tile` with the gradient of the target's raw logit divided by the returned factor. Of
        the gradient coefficients, only c_target and c_prob may be present, and there must be no
        soft cap. If given, `least` [n] is the size of the gradients that `chosen_gradient_` later
        writes into each row, and each returned factor is at least 2^-90 times this size in absolute
        value. The call also returns x [n, H] with row i multiplied by factors[i] in float32 or
        wider, then rounded to the dtype of x. With `order`, row i of every result is computed from
        row order.rows[i] of the inputs; rows from order.count on are arbitrary."""

    # ------------------------------------------------------------------ chosen columns

    def chosen_logits(self, x: Tensor, w: Tensor, columns: Tensor, transform: Transform) -> Tensor:
        """Return the logits z [n, K] of raw = x [n, H] @ w.T [H, v] at `columns` [n, K] int64, in
        float32 or wider; 0 for a column outside of [0, v)."""

    def chosen_gradient_(
        self,
        tile: Tensor,
        chosen: Chosen,
        backward: Backward,
        *,
        multiples: Tensor | None = None,
        order: Order | None = None,
    ) -> None:
        """At chosen columns, overwrite the gradient of the raw logits in `tile` [n, v] with the
        gradient of the whole loss, computed from log-probs, so that 1 - p is exact even for a
        probability p near 1. With `multiples` [n], the gradient in row i is multiples[i] times row
        i of `tile`. With `order`, row i of `tile` belongs to row order.rows[i] of the inputs."""

    def dense_order(self, keep: Tensor, most: int) -> Order:
        """Return a row order in which the rows kept by `keep` [n] bool come first. If c rows are
        kept, a kept row with an index below c stays in place, and a kept row with an index of at
        least c moves to the place of a row that is not kept, so that GPU programs in any order
        never read a row that is already overwritten. If more than `most` rows have keep=True,
        return the identity permutation of all n rows."""

    def given_rows(self, walk: Walk) -> SoftmaxState | None:
        """Return the statistics of the caller's logits, write the gradient to `out`, or do both. A
        row for which `live` is False gets statistics and gradients of 0. If one call computes
        statistics and gradient, the caller computes `coefficients` as if the entropy were 0, and
        the kernel adds the gradient terms of the entropy and of the derivatives `slopes`."""

    def scale_rows_(self, rows: LogitRows, factor: Tensor) -> None:
        """Multiply `rows` in place by the scalar tensor `factor`, in float32 or wider, rounded
        once; a factor of 1 changes nothing."""
