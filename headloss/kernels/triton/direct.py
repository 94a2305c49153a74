"""Both acts on all tokens of a call and the objective between them, launched from addresses.

n tokens, H hidden width, V vocabulary. A call of few tokens takes as long as the host, and most of
that goes into describing launches: tensors, their dtypes, how they lie. Here it is found out once.
The launches are those of `product_statistics`, a tape, `held_multiple_` and `scaled`, of the same
arguments: the first call of a kind gives them tensors, as these acts do, and keeps what was sent;
later ones give addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...objective.statistics import Coefficients, Normalizer
from ..rounding import lost
from ..transform import Transform
from .chosen import TOKENS
from .gradient import WIDE, Multiple, launch_rows
from .launch import Launcher, cdiv, is_watched
from .merge import ROWS, ActOne, Epilogue, asked, names
from .order import AT_ONCE, MOST, WIDEST, Cast, launch_scaled
from .product import product_of
from .records import NO, YES, programs_on, scaling
from .tape import start
from .tiles import WIDTH

Tape = Launch = Any  # of objective.tape, which stands above the kernels
Sent = list[Any]  # what each launcher returned, in order


class Direct:
    """The launches of all calls of one head, objective, transform and device.

    Args:
        tape: of an objective whose gradient is a multiple of the terms (`Backward.is_multiple`).
        needs: statistics.
        width: H.
        vocabulary: V.
    """

    def __init__(
        self, tape: Tape, needs: frozenset[str], transform: Transform, width: int, vocabulary: int,
        device: torch.device
    ) -> None:  # fmt: skip
        self.tape, self.flags, self.vocabulary = tape, asked(needs), float(vocabulary)
        z, whole = scaling(transform), scaling(transform, lost(device, width))
        self.product, self.factor = product_of(whole, device, holds=True), z.factor
        # A launch from addresses takes 0 for a tensor that is not there.
        absent: Any = {"temperature": 0, "bias": 0}
        self.scales = (z, whole), (z._replace(**absent), whole._replace(**absent))
        self.programs, self.device = programs_on(device), device.index
        # Rows [n]: two of the product's own, the normalizer, statistics, references, multiples.
        self.row = {name: 4 + i for i, name in enumerate(names(needs))}
        self.reference = 4 + len(self.row)
        self.parts = 1 + sum(flag.value for flag in self.flags[2:])
        self.kept: dict[tuple[Any, ...], Sent] = {}

    def call(self, x: Tensor, w: Tensor, targets: Tensor, into_weight: bool) -> Call:
        """Of x [n, H] and w [V, H] as `product_statistics` takes them, n > 0, and targets [n];
        whether dW is wanted."""
        return Call(self, x, w, targets, into_weight)

    def keep(self, kind: tuple[Any, ...], sent: Sent) -> None:
        """What was sent, where all of it may be sent from addresses."""
        if all(known is not None for one in sent for _, known in one):
            self.kept[kind] = sent

    def known(self, kind: tuple[Any, ...]) -> Sent | None:
        """What was sent for this kind of call, if it may be sent again, here and now."""
        found = self.kept.get(kind)
        if found is None or self.device != torch._C._cuda_getDevice() or is_watched():
            return None
        hooked = [1 for sent in found for turn, _ in sent if turn.kernel.pre_run_hooks]
        return None if hooked else found


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Call:
    """One call: `forward`, then `finish`.

    Attributes:
        measured: [M] float64, what the tape measured.
        loss: [].
    """

    def __init__(self, of: Direct, x: Tensor, w: Tensor, targets: Tensor, into_weight: bool):
        self.of, self.x, self.w, self.targets, n = of, x, w, targets, x.shape[0]
        alike = targets.data_ptr() % 16, n % 16 == 0, n == 1
        self.kind = x.stride(0), w.stride(0), *alike, into_weight
        self.pitch = 16 * cdiv(n, 16)
        self.room = x.new_empty((of.reference + 2) * self.pitch, dtype=torch.float32)
        self.into_weight: Any = into_weight  # whether, then where
        self.tiles: Sequence[Tensor] = ()
        self.made, self.sent = Sent(), of.known(self.kind)
        self.at, self.none = (_itself, None) if self.sent is None else (Tensor.data_ptr, 0)
        self.rows = self._cut(self.room, self.pitch)

    def _cut(self, room: Tensor, step: int) -> Sequence[Any]:
        """Pieces of a vector of float32."""
        if self.sent is None:
            return room.split(step)
        begin = room.data_ptr()
        return range(begin, begin + 4 * room.shape[0], 4 * step)

    def statistic(self, name: str) -> Tensor | None:
        """[n], where it was asked for."""
        if name not in self.of.row:
            return None
        start = self.of.row[name] * self.pitch
        return self.room[start : start + self.x.shape[0]]

    def _launch(
        self, launcher: Launcher, programs: Sequence[int], *given: Any, **constants: Any
    ) -> None:
        if self.sent is None:
            self.made.append(launcher(programs, *given, **constants))
            return
        stream = torch._C._cuda_getCurrentRawStream(self.of.device)
        known = self.sent[len(self.made)]
        for (_, one), count in zip(known, programs, strict=True):
            one.send(count, stream, given, self.tiles)
        self.made.append(known)

    def forward(
        self, confirm: Callable[[], object], launch: Callable[[dict[str, Any]], Launch],
        products: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    ) -> None:  # fmt: skip
        """Everything but the upstream gradient.

        Args:
            confirm: called as soon as act one is queued.
            launch: the tape's, for statistics by name.
            products: writes dW, if it is wanted, and returns dX; of terms [n, V] and features
                [n, H], whose memory dX may take.
        """
        of, x, w, at, rows, none = self.of, self.x, self.w, self.at, self.rows, self.none
        (n, h), v = x.shape, w.shape[0]
        blocks, reference, targets = cdiv(v, WIDTH), rows[of.reference], at(self.targets)
        parts = x.new_empty(of.parts * blocks * self.pitch, dtype=torch.float32)
        terms = x.new_empty(n, 8 * cdiv(v, 8), dtype=torch.bfloat16)  # rows of whole 16 bytes
        terms = terms[:, :v] if v % 8 else terms
        px, pe, stride, self.tiles = at(x), at(terms), terms.stride(0), (x, w, terms)
        z, whole = of.scales[self.sent is not None]
        epilogue = reference, rows[0], at(parts), self.pitch, blocks * self.pitch, whole, of.flags
        one = ActOne(x.stride(0), w.stride(0), stride, z, NO, Epilogue(*epilogue, None))
        given = px, at(w), pe, targets, one, 0, n, v, h, of.vocabulary
        counts = cdiv(n, TOKENS), of.programs, cdiv(n, ROWS)
        self._launch(of.product, counts, *given, PROGRAMS=of.programs)
        self.tiles = ()
        del parts, epilogue, one, given  # its memory may be taken from here on
        confirm()
        found = launch({name: rows[row] for name, row in of.row.items()})
        registers, step, self.measured, self.loss = start(of.tape, found)
        vectors = self._cut(registers, step)
        c = [none if k is None else vectors[k] for k in of.tape.places]
        features = x.new_empty(n, h)
        multiple = Multiple(
            pe, stride, targets, of.factor, none, Normalizer(rows[2], rows[3]), Coefficients(*c),
            rows[of.row["logp"]], reference, None, px, x.stride(0), at(features),
            rows[of.reference + 1], none
        )
        self._launch(launch_rows, (n,), multiple, 0, v, h, BLOCK=WIDE)
        del registers  # an address keeps nothing: these had to live until here
        self.into_weight = w.new_empty(w.shape) if self.into_weight else None
        self.into_hidden = products(terms, features, self.into_weight)

    def finish(self, factor: Tensor) -> list[Tensor]:
        """dX [n, H] and dW [V, H], if it is wanted, times the upstream gradient []."""
        (n, h), found = self.x.shape, [self.into_hidden]
        if self.sent is not None and factor.data_ptr() % 16:
            self.sent = self.none = None
            self.at, self.rows = _itself, self._cut(self.room, self.pitch)
        at, rows = self.at, self.rows[self.of.reference + 1]
        x = at(self.into_hidden)
        casts, programs = [Cast(x, x, n, h, YES, YES, rows)], n * cdiv(h, WIDEST)
        if self.into_weight is not None:
            w, size = at(self.into_weight), self.into_weight.numel()
            found.append(self.into_weight)
            casts.append(Cast(w, w, 1, size, YES, YES, self.none))
            programs = max(programs, cdiv(size, WIDEST))
        casts += [casts[0]._replace(n=0)] * (AT_ONCE - len(casts))
        self._launch(launch_scaled, (min(MOST, programs),), at(factor), *casts, BLOCK=WIDEST)
        if self.sent is None and all(self.made):
            self.of.keep(self.kind, self.made)
        return found
