"""Both acts on all tokens of a call and the objective between them, sent again from addresses.

n tokens, H hidden width, V vocabulary. A call of few tokens takes as long as the host does, and
most of that goes into describing launches: tensors, their dtypes, how they lie. The first call of a
kind describes its launches, as all calls do, and a log is kept of them; later ones send the same
kernels other addresses. The launches are those of `product_statistics` with held terms, of a tape,
of `held_multiple_` and of `scaled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interface import Scaling
from ..rounding import lost
from ..transform import Transform
from .chosen import TOKENS
from .gradient import launch_rows
from .launch import Known, Log, is_watched
from .merge import ROWS, asked, names
from .order import AT_ONCE, MOST, WIDEST, launch_scaled, scaled
from .product import product_of
from .records import NO, YES, constant, programs_on, scaling
from .tape import launch_tape, start
from .tiles import WIDTH

Tape = Launch = Any  # of objective.tape, which stands above the kernels
Kind = tuple[Any, ...]  # what kernels are compiled for, as far as calls of an `Again` differ in it
MOST_KINDS = 256  # that are kept
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Sent(NamedTuple):
    """What calls of one kind send."""

    act_one: list[Known]
    tape: Known
    act_two: Known
    scaled: Known
    hooks: tuple[Any, ...] = ()  # lists of what is to run before a kernel; they may fill up later


class Again:
    """What all calls of one head, objective, transform and device send.

    Args:
        tape: of an objective whose gradient is a multiple of the terms (`Tape.is_multiple`).
        needs: statistics.
        width: H.
        vocabulary: V.
        bias: as the calls' own, whose rows of 16 bytes are whole (`kernels.suits_product`).
    """

    def __init__(
        self, tape: Tape, needs: frozenset[str], transform: Transform, width: int, vocabulary: int,
        device: torch.device, bias: Tensor | None
    ) -> None:  # fmt: skip
        self.tape, self.flags, self.vocabulary, self.width = tape, asked(needs), vocabulary, width
        transform = replace(transform, bias=bias)
        z, whole = scaling(transform), scaling(transform, lost(device, width))
        self.product, self.factor = product_of(whole, device, holds=True), z.factor
        # A launch from addresses takes 0 for a tensor that is not there; that of the bias is last.
        self.z, self.whole = (of._replace(temperature=0)[:-1] for of in (z, whole))
        self.bias_dtype: Any = None if bias is None else bias.dtype
        self.programs, self.device = programs_on(device), device.index
        self.blocks, self.stride = -(-vocabulary // WIDTH), -(-vocabulary // 8) * 8
        self.parts = self.blocks * (1 + sum(flag.value for flag in self.flags[2:]))
        # Rows [n]: two of the product's own, the normalizer, statistics, references, multiples.
        self.row = {name: 4 + i for i, name in enumerate(names(needs))}
        self.rows = 6 + len(self.row)
        self.kept: dict[Kind, Sent] = {}

    def kind(self, n: int, strides: tuple[int, int], targets: Tensor) -> Kind:
        """Of a call of n > 0 tokens; strides of x [n, H] and w [V, H], which `product_statistics`
        takes."""
        return n % 16 == 0, n == 1, strides, targets.data_ptr() % 16

    def known(self, kind: Kind) -> Callable[..., Call] | None:
        """Makes calls of this kind, where what they send is known, and may be sent here and now."""
        found = self.kept.get(kind)
        if found is None or self.device != torch._C._cuda_getDevice():
            return None
        if is_watched() or any(found.hooks):
            return None
        return partial(Call, self, found)

    def record(self, kind: Kind) -> Record:
        """A log for a call of this kind."""
        return Record(self, kind)


class Record(Log):
    """A log of a call's launches, which it may `keep` at the end."""

    def __init__(self, of: Again, kind: Kind) -> None:
        self.of, self.kind = of, kind

    def keep(self) -> None:
        """What was sent, where all of it may be sent from addresses."""
        kept = self.of.kept
        launchers = self.of.product, launch_tape, launch_rows, launch_scaled
        sent: Any = [self.get(launcher) for launcher in launchers]
        if all(sent):
            if len(kept) >= MOST_KINDS:
                kept.clear()
            hooks = [turn.kernel.pre_run_hooks for one in launchers for turn in one.turns]
            kept[self.kind] = Sent(sent[0], *[known for (known,) in sent[1:]], tuple(hooks))


class Call:
    """One call: made, then `differentiate`, then `finish`.

    Attributes:
        measured: [M] float64, what the tape measured.
        loss: [].
    """

    measured: Tensor
    loss: Tensor

    def __init__(
        self, of: Again, sent: Sent, x: Tensor, w: Tensor, bias: Tensor | None, targets: Tensor
    ) -> None:
        """Act one is queued."""
        (n, h), v, stride = x.shape, of.vocabulary, of.stride
        pitch = -(-n // 16) * 16  # so that all vectors begin at whole 16 bytes
        self.room = x.new_empty(of.rows * pitch, dtype=torch.float32)
        parts = x.new_empty(of.parts * pitch, dtype=torch.float32)
        terms = x.new_empty(n, stride)  # rows of whole 16 bytes
        self.terms = terms = terms if v == stride else terms[:, :v]
        self.of, self.sent, self.n, self.pitch = of, sent, n, pitch
        first, step = self.room.data_ptr(), 4 * pitch
        self.at = [*range(first, first + of.rows * step, step)]  # of the rows
        px, pe, py, x_stride = x.data_ptr(), terms.data_ptr(), targets.data_ptr(), x.stride(0)
        self.tokens, references = (px, pe, py, x_stride), self.at[-2]
        b = 0 if bias is None else bias.data_ptr()
        to = references, first, parts.data_ptr(), pitch, of.blocks * pitch, (*of.whole, b)
        act = x_stride, w.stride(0), stride, (*of.z, b), NO, (*to, of.flags, None)
        given = px, w.data_ptr(), pe, py, act, 0, n, v, h, float(v)
        counts = -(-n // TOKENS), of.programs, -(-n // ROWS)
        self.stream = stream = current_stream(of.device)
        for known, count in zip(sent.act_one, counts, strict=True):
            known.send(count, stream, given, (x, w, terms))

    def statistic(self, name: str) -> Tensor | None:
        """[n], where it was asked for."""
        row = self.of.row.get(name)
        return None if row is None else self._row(row)

    @property
    def multiples(self) -> Tensor:
        """[n], of the terms' rows."""
        return self._row(self.of.rows - 1)

    def _row(self, row: int) -> Tensor:
        return self.room[row * self.pitch : row * self.pitch + self.n]

    def differentiate(self, launch: Callable[[Tape, dict[str, Any]], Launch]) -> Tensor:
        """The objective and act two: the terms become those of the gradient, and the features
        [n, H] that go with them are returned. `launch`: a tape's, for addresses of statistics."""
        of, at, n, (px, pe, py, x_stride) = self.of, self.at, self.n, self.tokens
        found = {name: at[row] for name, row in of.row.items()}
        sent, stream, inputs = self.sent, self.stream, launch(of.tape, found)
        registers, step, self.measured, self.loss = start(of.tape, inputs, sent.tape, stream)
        begin, h = registers.data_ptr(), of.width
        c = tuple([0 if k is None else begin + 4 * step * k for k in of.tape.places])
        features = self.terms.new_empty(n, h)
        multiple = (
            pe, of.stride, py, of.factor, 0, (at[2], at[3]), c, found["logp"], at[-2], None,
            px, x_stride, features.data_ptr(), at[-1], 0
        )  # fmt: skip
        sent.act_two.send(n, stream, (multiple, 0, of.vocabulary, h))
        return features  # until here the registers had to live: an address keeps nothing

    def finish(
        self, x: Tensor, w: Tensor | None, bias: Tensor | None, factor: Tensor
    ) -> list[Tensor | None]:
        """Gradients from the products of the features [n, H] and the weight [V, H], in the same
        memory, and from the sum of the bias [V] in float32, times the upstream gradient []."""
        n, h, multiples, dtype = self.n, self.of.width, self.at[-1], self.of.bias_dtype
        if factor.data_ptr() % 16 or is_watched() or any(self.sent.hooks):
            sums = [Scaling(x, x.dtype, rows=self.multiples)]
            sums += [] if w is None else [Scaling(w, w.dtype)]
            sums += [] if bias is None else [Scaling(bias, dtype)]
            *_, last = scaled(sums, factor)
            return [x, w, None if bias is None else last]
        to, programs, into = x.data_ptr(), n * -(-h // WIDEST), bias
        casts = [(to, to, n, h, YES, YES, multiples)]
        if w is not None:
            place, size = w.data_ptr(), w.numel()
            casts.append((place, place, 1, size, YES, YES, 0))
            programs = max(programs, -(-size // WIDEST))
        if bias is not None:
            place, size, same = bias.data_ptr(), bias.numel(), bias.dtype == dtype
            into = bias if same else torch.empty_like(bias, dtype=dtype)
            casts.append((place, into.data_ptr(), 1, size, YES, constant(same), 0))
            programs = max(programs, -(-size // WIDEST))
        casts += [(to, to, 0, h, YES, YES, multiples)] * (AT_ONCE - len(casts))
        stream = current_stream(self.of.device)
        self.sent.scaled.send(min(MOST, programs), stream, (factor.data_ptr(), *casts))
        return [x, w, into]
