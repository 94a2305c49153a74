"""From the nodes of a recording to the instructions of a tape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..kernels.opcodes import INPUTS, MEASUREMENTS, NUMBERS, Op
from .recording import Node, Source
from .tape import Reported, Row, Tape

TENSORS = frozenset({"tokens", "segments", "factor"})  # numbers that may lie on the device


class Written(NamedTuple):
    """A recording: its nodes, and which of them are results."""

    nodes: list[Node]
    vectors: list[tuple[Source, int]]  # what they are, and nodes of OUT
    measured: list[tuple[int, int]]  # (measurement, node); a measurement adds up its nodes
    kinds: list[Op]  # of measurements
    reported: list[Reported]


def lowered(written: Written, terms: int, unit: int, dtype: torch.dtype) -> Tape | None:
    """The nodes that results need, in phases, each with a register; None if they are too many."""
    nodes, vectors, measured, kinds, reported = written
    targets: dict[int, list[int]] = {}
    for at, node in [*((at, node) for at, (_, node) in enumerate(vectors)), *measured]:
        targets.setdefault(node, []).append(at)
    levels = _levels(nodes, list(targets))
    order = sorted(levels, key=levels.__getitem__)
    inputs = _sources(nodes, order, Op.LOAD)
    numbers = _sources(nodes, order, Op.NUMBER)
    addresses = len(inputs) + sum(kind in TENSORS for kind, _ in numbers)
    if max(addresses - INPUTS, len(numbers) - NUMBERS, len(kinds) - MEASUREMENTS) > 0:
        return None
    rows, registers = _allocated(nodes, order, targets, [len(vectors), 0])
    places = {Op.LOAD: inputs, Op.NUMBER: numbers}
    phases: list[list[Row]] = [[] for _ in range(max(levels.values(), default=0) + 1)]
    for v, row in rows:
        if row.op in places:
            row = row._replace(operands=(places[row.op].index(nodes[v].operands[0]),))
        phases[levels[v]].append(row)
    return Tape(
        phases=tuple(map(tuple, phases)),
        registers=registers,
        inputs=tuple(inputs),
        numbers=tuple(numbers),
        vectors=tuple(source for source, _ in vectors),
        kinds=tuple(kinds),
        terms=terms,
        reported=tuple(reported),
        dtype=dtype,
        segments_per_unit=unit,
    )


def _sources(nodes: list[Node], order: Iterable[int], op: Op) -> list[Source]:
    return list(dict.fromkeys(nodes[v].operands[0] for v in order if nodes[v].op is op))


def _levels(nodes: list[Node], results: list[int]) -> dict[int, int]:
    """The phase of every node that a result needs: even over tokens, odd over segments; each node
    stands after those that it reads, inputs right before they are needed."""
    levels: dict[int, int] = {}

    def visit(v: int) -> None:
        if v in levels:
            return
        node = nodes[v]
        for o in node.reads:
            visit(o)
        crossed = [levels[o] + (nodes[o].kind != node.kind) for o in node.reads]
        levels[v] = max(crossed, default=node.kind)

    for v in results:
        visit(v)
    first: dict[int, int] = {}
    for v, level in levels.items():
        for o in nodes[v].reads:
            if not nodes[o].reads:
                level_of_input = level - (nodes[o].kind != nodes[v].kind)
                first[o] = min(first.get(o, level_of_input), level_of_input)
    return levels | first


def _allocated(
    nodes: list[Node], order: list[int], targets: dict[int, list[int]], taken: list[int]
) -> tuple[list[tuple[int, Row]], tuple[int, int]]:
    """Instructions with registers, which are used again once nothing reads them any more; how many
    there are over tokens and over segments. No instruction writes what it reads."""
    last = {o: at for at, v in enumerate(order) for o in nodes[v].reads}
    free: tuple[list[int], list[int]] = ([], [])
    place: dict[int, int] = {}
    rows = []
    for at, v in enumerate(order):
        op, operands, kind = nodes[v]
        outs = targets.get(v)
        if outs is None:
            if not free[kind]:
                free[kind].append(taken[kind])
                taken[kind] += 1
            place[v] = free[kind].pop()
            outs = [place[v]]
        read = tuple(place[o] if isinstance(o, int) else o for o in operands)
        rows += [(v, Row(op, out, read, kind)) for out in outs]
        for o in set(nodes[v].reads):
            if last[o] == at:
                free[nodes[o].kind].append(place[o])
    return rows, (taken[0], taken[1])
