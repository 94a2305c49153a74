"""Acts of a backend, and their records.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, K stored tokens.
`raw` [n, v] are logits as a product left them, z = transform(raw), p = softmax(z) over the whole
vocabulary. Acts take the statistics of a tile, a `SoftmaxState`, or the gradient of its logits:

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

Tiles and matrices may have any row stride and have unit stride along the row; memory beside their
columns is never touched. Vectors are contiguous, and float32 (float64 beside float64 tiles) where
nothing else is said. n may be 0. An act only reads what it does not say that it writes. No act
waits for the device: what it returns is complete when the device gets there.
"""
# pyright: reportReturnType=false
# An act's description is all of its body here.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState, Statistics
from .pair import Chosen, Divergence, Pair, StoredTopk
from .transform import Transform


class Forward(NamedTuple):
    """What statistics need beside the logits."""

    targets: Tensor | None  # [n] int64: columns of the whole vocabulary, some outside of this tile;
    # None, for `partials` alone: no column is one
    first: int
    transform: Transform  # with a temperature [n] or a number
    needs: frozenset[str]  # statistics


class Backward(NamedTuple):
    """What the gradient needs beside the logits.

    Logits that a product makes a second time may be rounded differently from the first ones, whose
    statistics these are. Therefore the gradient at a target follows from `logps`, which keeps the
    last digit of 1 - p. A column that has nearly all the mass has the normalizer's largest logit.
    """

    targets: Tensor  # [n] int64
    first: int
    transform: Transform
    normalizer: Normalizer  # [n], of the whole vocabulary
    coefficients: SoftmaxCoefficients  # [n]
    logps: Tensor | None  # [n] of the targets; None: these have no coefficient, and are as others
    dtype: torch.dtype | None = None  # of the gradient, at most as wide as the tile's, its default
    all_columns: bool = False  # the tile has all, and they are the logits of the statistics

    def rows(self, rows: slice | Tensor) -> Backward:
        """Of some of the tokens, in the tile's own dtype."""
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
    """exp(z - shift) of some tokens, in place of their logits."""

    exp_logits: Tensor  # [n, v] bfloat16; float32 and float64 beside hidden states of those
    shift: Tensor  # [n] a logit of each token, the largest or not far below it

    @classmethod
    def empty(cls, n: int, v: int, like: Tensor) -> ExpTile:
        """Memory for the products of factors `like` this one; rows are whole 16 bytes."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        dtype = torch.bfloat16 if like.dtype.itemsize == 2 else wide
        exp_logits = like.new_empty(n, 8 * -(-v // 8), dtype=dtype)
        return cls(exp_logits[:, :v] if v % 8 else exp_logits, like.new_empty(n, dtype=wide))


def partials_of(fields: Sequence[Tensor], needs: frozenset[str]) -> SoftmaxState:
    """By name: max_logit, sumexp_m1, target, then entropy_sum where the entropy is needed and
    logit_sum where the mean logit is."""
    max_logit, sumexp_m1, target, *more = fields
    entropy_sum = more[0] if "entropy" in needs else None
    logit_sum = more[-1] if "mean_logit" in needs else None
    return SoftmaxState(max_logit, sumexp_m1, target, entropy_sum, logit_sum)


class Measured(NamedTuple):
    """The statistics of some tokens over the whole vocabulary."""

    stats: Statistics  # [n] each
    normalizer: Normalizer  # [n]

    def rows(self, rows: slice | Tensor) -> Measured:
        """Of some of the tokens."""
        return Measured(self.stats.map(lambda t: t[rows]), self.normalizer.rows(rows))


class ShiftedSums(NamedTuple):
    """Of each token, over a slice of the vocabulary, the sum of exp(z_j - shift) dz_j/draw_j w_j,
    of which the hidden gradient of c_target and c_prob is made."""

    rows: Tensor  # [n, H] float32
    shift: Tensor  # [n] float32
    column: Tensor  # [n] int64 in the slice, which the sum leaves out
    far: Tensor  # [n] bool: the shift is far below the largest logit, and the sum invalid


class LogitRows(NamedTuple):
    """The packed tokens' rows in a tensor of any layout with unit stride along the vocabulary."""

    tensor: Tensor  # [.., V]
    offsets: Tensor  # [n] int64, elements from the first
    aligned: bool  # every offset is a multiple of 16


class Walk(NamedTuple):
    """One pass over rows of logits that exist already: statistics, a gradient, or both."""

    logits: LogitRows
    out: LogitRows | None  # of the logits' dtype; may be the logits. None: no gradient
    live: Tensor | None  # [n] bool: other rows are not read, and have coefficients of 0
    targets: Tensor  # [n] int64
    first: int
    transform: Transform
    needs: frozenset[str] | None  # statistics; None: not taken, `normalizer` has them
    coefficients: SoftmaxCoefficients | None = None  # [n]; with `needs`: at an entropy of 0
    slopes: Tensor | None = None  # [parts, 5, n], with `needs`: more of dL/dlogp, see stats.Slope
    normalizer: Normalizer | None = None  # [n]


class Support(NamedTuple):
    """The columns that the softmax of each of n tokens runs over: P pairs of a token and a column,
    of which those in a window of the vocabulary count here."""

    ids: Tensor  # [P] int64 columns of the whole vocabulary; below 0: an empty slot
    offsets: Tensor  # [n + 1] int64: token t has ids[offsets[t]:offsets[t + 1]]; the first is 0
    first: int  # the window is columns [first, first + size)
    size: int


class Order(NamedTuple):
    """The row that goes to each place. Places from `count` on hold arbitrary rows."""

    rows: Tensor  # [n] int64
    count: Tensor  # [1] int64


class Sum(NamedTuple):
    """A sum that becomes a gradient, contiguous."""

    value: Tensor
    dtype: torch.dtype  # of the gradient
    rows: Tensor | None = None  # [n] float32: a factor of each row of the value [n, H]


class Acts(Protocol):
    """Acts of every backend. Each module that `kernels.load` returns is one."""

    # ------------------------------------------------------------------ a tile of logits

    def partials(
        self,
        raw: Tensor,
        forward: Forward,
        onto: SoftmaxState | None = None,
        without: Tensor | None = None,
    ) -> SoftmaxState:
        """Statistics. raw [n, v] float32, bfloat16, float16 (or float64) -> [n] vectors.

        Only what `needs` asks for is taken. With `onto`, the partials of the tile and of those
        that gave `onto`, whose vectors may be overwritten and returned. With `without` [n, K]
        int64, and targets that are nowhere, over all columns but these, of which some may lie
        outside of the tile: digits that 1 - sum would lose.
        """

    def best(self, raw: Tensor, transform: Transform) -> tuple[SoftmaxState, Tensor]:
        """The state of a tile without a target, and the column [n] int64 of each row's largest
        logit, of equal ones the first."""

    def logit_gradient_(self, raw: Tensor, backward: Backward) -> Tensor:
        """dL/draw [n, v], over `raw`, or with `dtype` in the front of each of its rows."""

    def finish(self, slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
        """Statistics from the partials of W slices of a vocabulary, which is of this size, in their
        order: slices [W, 3 + .., n], contiguous, fields as in `partials_of`."""

    # ------------------------------------------------------------------ rows

    def scaled_rows(
        self, x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """out[places] = x[:n] * scale of each row, in float32 or wider and rounded once: x and out
        [.., H], scale [n] float32, places [n] int64, none twice, or the first n; out is new and of
        x's dtype, or may be x."""

    def scaled(self, sums: Sequence[Sum], factor: Tensor | None) -> list[Tensor]:
        """Each sum times its rows' factors (of one length) and `factor` [], in float32 or wider
        and rounded to its dtype once; in place where that is the value's own."""

    # ------------------------------------------------------------------ a support

    def support_logits(
        self, x: Tensor, w: Tensor, support: Support, onto: Tensor | None = None
    ) -> Tensor:
        """[P] x[token] . w[id - first] of each pair in the window, in float32 or wider, in float32
        (float64 beside float64); 0 elsewhere. Added to `onto` where it is given.

        x [n, H] and w [size, H] may have any strides and differ in dtype.
        """

    def support_partials(self, raw: Tensor, support: Support, forward: Forward) -> SoftmaxState:
        """Statistics of each token's pairs in the window, of their raw logits [P]. `forward.first`
        is the support's. A token without any is an empty slice: max_logit -inf, sumexp_m1 -1."""

    def support_gradient(self, raw: Tensor, support: Support, backward: Backward) -> Tensor:
        """dL/draw of each pair [P], 0 outside of the window."""

    def support_sums(
        self,
        values: Tensor,
        rows: Tensor,
        support: Support,
        out: Tensor,
        add: bool = False,
        uneven: bool = False,
    ) -> None:
        """out [n, H] = sum of values [P] * rows[id - first] over each token's pairs in the window,
        in their order, in float32 or wider and rounded once; with `add`, added to what is there.
        Rows whose value is 0 are not read. This is the gradient of hidden states; with tokens and
        columns exchanged it is a weight's, whose pairs are `uneven`: one row may have far more than
        another, `first` is 0, and all pairs lie in the window."""

    # ------------------------------------------------------------------ pairs of tiles: see `pair`

    def divergence(self, raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
        """[n, K, 2]: a tile's shares of each divergence and of its mean slope; the log-acceptance
        of a tile as if it were all (`divergence.merge_shares`)."""

    def part_gradient_(
        self,
        raw: Tensor,
        part: Divergence | StoredTopk,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        """d part / d raw + extra [n, v], in new float32 (or float64) memory, or over `extra`; with
        `others`, the rest of the objective, the whole gradient over raw as in `logit_gradient_`:
        its transform differs from the part's in the temperature alone."""


class Kernels(Acts, Protocol):
    """What the triton backend has as well. Plans for another one ask for none of these acts."""

    def fixed_product(
        self, a: Tensor, b: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """a [n, k] @ b [k, m]: [n, m] in `dtype`, rounded once, or added to `out` [n, m].

        b has any strides. Sums are in float32, in an order that depends neither on n nor on a row's
        place.
        """

    # ------------------------------------------------------------------ products that end in an act

    def can_fuse(self, x: Tensor, w: Tensor) -> bool:
        """Whether the acts on a product accept these operands; if not, those raise ValueError."""

    def product_partials(
        self, x: Tensor, w: Tensor, forward: Forward, exp_tile: ExpTile | None = None
    ) -> SoftmaxState:
        """Statistics of raw = x [n, H] @ w.T [H, v], both 16 bits wide, from the float32 sums.

        `exp_tile` [n, v] is filled. `max_logit` is the shift of both sums of exponentials: any
        logit that is not far below the largest; the largest itself for `top1`. `merge` and `finish`
        of `stats` take any.
        """

    def product_statistics(
        self,
        x: Tensor,
        w: Tensor,
        forward: Forward,
        vocabulary: int,
        exp_tile: ExpTile | None = None,
    ) -> Measured:
        """`product_partials` of all columns, and `softmax.finish`."""

    def product_gradient(self, x: Tensor, w: Tensor, backward: Backward) -> Tensor:
        """dL/draw of raw = x [n, H] @ w.T [H, v]: [n, v] in x's dtype, in new memory."""

    # ------------------------------------------------------------------ a narrow head

    def can_sweep(self, w: Tensor) -> bool:
        """Return True if the acts below take this weight on its device, with hidden states of its
        dtype and unit stride along H. Sums over the vocabulary are in float32, in one order for any
        n."""

    def narrow_partials(
        self, x: Tensor, w: Tensor, forward: Forward, sums: bool = False
    ) -> tuple[SoftmaxState, ShiftedSums | None]:
        """Statistics of raw = x [n, H] @ w.T [H, v], as of `product_partials`; with `sums` those of
        n > 0 tokens too, of operands that are not float16, whose exponents do not suffice."""

    def narrow_hidden(
        self, x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
    ) -> Tensor:
        """[n, H] dL/draw @ w in float32; dL/draw is rounded to w's dtype. Of c_target and c_prob
        the sums of the forward pass serve, whose normalizer is then the whole vocabulary's."""

    def narrow_weight_(
        self,
        x: Tensor,
        w: Tensor,
        backward: Backward,
        out: Tensor | None,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """out [v, H] = dL/draw.T @ x * factor [], rounded once; dL/draw is rounded to x's dtype.
        bias[:v] = the sums of dL/draw's columns, in float32. Each where it is given."""

    # ------------------------------------------------------------------ exp logits

    def exp_gradient_(
        self, exp_tile: ExpTile, backward: Backward, *, order: Order | None = None
    ) -> Tensor:
        """dL/draw from exp logits, over them: [n, v] in their dtype, for any coefficients but
        c_uniform under a soft cap, where exp z of 0 does not tell z. With `order`, row i of it is
        that of row order.rows[i], and rows from `count` on hold anything.
        """

    def exp_multiple_(
        self,
        exp_tile: ExpTile,
        backward: Backward,
        *,
        x: Tensor | None = None,
        order: Order | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """s [n] such that dL/draw = s e, where only c_target and c_prob are there and no soft cap;
        the targets' e are set to suit.

        `least` [n]: what is still to be put into a row is as large as this, so that s must not be
        far below it.

        The second is s * x of x [n, H], in float32 or wider and rounded once. With `order`, row i
        of e, s and s * x is that of row order.rows[i], and rows from `count` on hold anything.
        """

    # ------------------------------------------------------------------ chosen columns

    def chosen_logits(self, x: Tensor, w: Tensor, columns: Tensor, transform: Transform) -> Tensor:
        """z [n, K] of raw = x [n, H] @ w.T [H, v] at columns [n, K] int64, in float32 or wider; 0
        where a column is outside [0, v)."""

    def chosen_gradient_(
        self,
        tile: Tensor,
        chosen: Chosen,
        backward: Backward,
        *,
        multiples: Tensor | None = None,
        order: Order | None = None,
    ) -> None:
        """Set dL/draw of the chosen columns in a tile that holds it [n, v]: the coefficients' own,
        the target's and the slopes', from the log-probs and so to the digits of 1 - p.

        With `multiples` [n], row i of the tile holds it over multiples[i]. `order` as in
        `exp_gradient_`.
        """

    # ------------------------------------------------------------------ rows

    def dense_order(self, keep: Tensor, most: int) -> Order:
        """Which row goes to which place, so that those of keep [n] bool come first.

        A kept row below their number stays where it is, the others fill the gaps: no row is read
        after it is written, in whatever order the rows are worked on. Where more than `most` are
        kept, moving is not worth it: all stay, and all count.
        """

    # ------------------------------------------------------------------ logits where they lie

    def given_rows(self, walk: Walk) -> SoftmaxState | None:
        """Statistics of each row, then its gradient into `out`; either may be left out.

        Statistics and gradients of rows that are not live are 0. In one call the coefficients are
        completed by the entropy's own part and by `slopes`, once the statistics are there.
        """

    def scale_rows_(self, rows: LogitRows, factor: Tensor) -> None:
        """rows *= factor [], in float32 or wider and rounded once; left alone where it is 1."""
