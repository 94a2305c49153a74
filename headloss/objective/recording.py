"""Records operations on vectors of tokens and segments, below autograd.

T tokens, S segments, P = S / 2 pairs. What runs on a small sample under a `Recorder` becomes a list
of nodes that holds for any T and S: sums over segments, expansion, lengths and pairs are nodes of
their own (`RecordedSegments`), sizes of the sample leave no trace. An operation that cannot be
recorded, such as one that reads a value, raises `Unrecorded`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..batch.segments import Linear, Segments
from ..kernels.opcodes import ELEMENTWISE, Op

TOKENS, SEGMENTS = 0, 1


class Unrecorded(Exception):
    """An operation that a tape has no instruction for."""


class Constant(NamedTuple):
    value: float


ZERO, ONE, MINUS = Constant(0.0), Constant(1.0), Constant(-1.0)
Operand = int | Constant  # the number of a node, or a constant
Source = tuple[str, Any]  # ("field", "advantages"), ("tokens", None)...


class Node(NamedTuple):
    """A vector over `kind`: over tokens or over segments. Pairs stand at both of their segments."""

    op: Op
    operands: tuple[Any, ...]
    kind: int

    @property
    def reads(self) -> list[int]:
        """The nodes that it is made of; of an input none."""
        return [o for o in self.operands if isinstance(o, int)]


class Recorder(TorchDispatchMode):
    """Records nodes. A tensor is identified by its memory, so that a view counts as its base."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.largest = Constant(torch.finfo(dtype).max)
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._of: dict[Any, Operand] = {}
        self._kept: list[Tensor] = []  # which is kept, so that no other tensor gets the same

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this Torch imports its compiler, only to find that nothing is to be compiled."""
        return False

    # ------------------------------------------------------------------ tensors and nodes

    def know(self, tensor: Tensor, operand: Operand) -> Tensor:
        """From here on `tensor` stands for `operand`."""
        self._kept.append(tensor)
        self._of[tensor.untyped_storage()._cdata] = operand
        return tensor

    def of(self, value: Any) -> Operand:
        if isinstance(value, int | float):
            return Constant(float(value))
        if not isinstance(value, Tensor):
            raise Unrecorded(f"an argument {value!r}")
        found = self._of.get(value.untyped_storage()._cdata)
        if found is None:
            raise Unrecorded("a tensor from outside")
        return found

    def load(self, source: Source, kind: int = TOKENS) -> int:
        return self.node(Node(Op.LOAD, (source,), kind))

    def __call__(self, op: Op, *operands: Operand) -> Operand:
        """The node of an instruction, or the operand or constant that it simplifies to."""
        kinds = {self.nodes[o].kind for o in operands if isinstance(o, int)}
        if op in ELEMENTWISE and (simple := _simplified(op, operands)) is not None:
            return simple
        if len(kinds) != 1:
            raise Unrecorded(f"{op.name} of tokens and segments")
        kind = {Op.EXPAND: TOKENS, Op.TOTAL: SEGMENTS}.get(op, kinds.pop())
        return self.node(Node(op, operands, kind))

    def node(self, node: Node) -> int:
        """Its number. OUT gives a vector back; a measurement is of values, a factor and a mask."""
        constants = {o for o in node.operands if isinstance(o, Constant)}
        for extra in sorted(constants)[1:]:  # an instruction has room for one
            register = self.register(extra, node.kind)
            operands = tuple(register if o == extra else o for o in node.operands)
            node = node._replace(operands=operands)
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    # ------------------------------------------------------------------ between tokens and segments

    def expand(self, operand: Operand) -> Operand:
        """A segment's value at its tokens. What needs no sum is made of inputs at each token."""
        if isinstance(operand, Constant):
            return operand
        if not self._without_sums(operand):
            return self(Op.EXPAND, operand)
        op, operands, _ = self.nodes[operand]
        return self.load(*operands) if op is Op.LOAD else self(op, *map(self.expand, operands))

    def _without_sums(self, operand: Operand) -> bool:
        if isinstance(operand, Constant):
            return True
        op, operands, _ = self.nodes[operand]
        return op is Op.LOAD or (op in ELEMENTWISE and all(map(self._without_sums, operands)))

    def total(self, operand: Operand) -> Operand:
        """Sums over segments; of a boolean field they are an input, so that tokens may be cut."""
        if isinstance(operand, int):
            op, operands, _ = self.nodes[operand]
            if op is Op.LOAD and operands[0][0] == "mask":
                return self.load(("kept", operands[0][1]), SEGMENTS)
        return self(Op.TOTAL, self.register(operand))

    def register(self, operand: Operand, kind: int = TOKENS) -> int:
        """A constant as a vector."""
        if isinstance(operand, int):
            return operand
        return self.node(Node(Op.MIN, (operand, operand), kind))

    # ------------------------------------------------------------------ operations of torch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        name = name if name.endswith("__") else name.removesuffix("_")  # in place
        if name in VALUES:
            if name == "_to_copy" and args[0].is_floating_point() > found.is_floating_point():
                raise Unrecorded("rounding to integers")
            value = VALUES[name]
            self.know(found, self.of(args[value]) if isinstance(value, int) else value)
        elif name in OPERATIONS:
            values = [a if a is None else self.of(a) for a in args]
            made = OPERATIONS[name](self, *values, **{k: self.of(v) for k, v in kwargs.items()})
            for out in found if isinstance(found, tuple) else (found,):
                self.know(out, made)
        elif name != "sum":  # of all tokens: it may be differentiated, but nothing may read it
            raise Unrecorded(str(func))
        return found


def _simplified(op: Op, operands: tuple[Operand, ...]) -> Operand | None:
    """The result where it needs no instruction."""
    if all(isinstance(o, Constant) for o in operands):
        values = [torch.tensor(o.value, dtype=torch.float64, device="cpu") for o in operands]  # type: ignore[union-attr]
        return Constant(float(COMPUTE[op](*values)))
    neutral = {Op.MUL: 1.0, Op.DIV: 1.0, Op.ADD: 0.0, Op.SUB: 0.0}.get(op)
    if neutral is not None and operands[1] == Constant(neutral):
        return operands[0]
    if op in (Op.MUL, Op.ADD) and operands[0] == Constant(neutral):  # type: ignore[arg-type]
        return operands[1]
    if op is Op.WHERE and isinstance(operands[0], Constant):
        return operands[1] if operands[0].value else operands[2]
    return None


# What each elementwise instruction computes; comparisons give 0 or 1.
COMPUTE: dict[Op, Callable[..., Tensor]] = {
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.GT: lambda a, b: (a > b).to(a.dtype),
    Op.GE: lambda a, b: (a >= b).to(a.dtype),
    Op.EQ: lambda a, b: (a == b).to(a.dtype),
    Op.WHERE: lambda c, a, b: torch.where(c != 0, a, b),
    Op.EXP: torch.exp,
    Op.LOG: torch.log,
    Op.EXPM1: torch.expm1,
    Op.LOG1P: torch.log1p,
    Op.SIGMOID: torch.sigmoid,
}

# ---------------------------------------------------------------------- aten, in instructions

# What gives values as they are: a constant, or the place of the values among the arguments.
VALUES: dict[str, Constant | int] = {
    **dict.fromkeys(("detach", "alias", "clone", "_to_copy", "lift_fresh"), 0),
    **dict.fromkeys(("view", "_unsafe_view", "expand", "scalar_tensor"), 0),
    **{"full": 1, "full_like": 1, "new_full": 2},
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), ZERO),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), ONE),
}


def _plain(op: Op) -> Callable[..., Operand]:
    return lambda e, *operands: e(op, *operands)


def _clamp(e, x, min=None, max=None):
    x = x if min is None else e(Op.MAX, x, min)
    return x if max is None else e(Op.MIN, x, max)


def _power(e, x, exponent):
    if exponent == Constant(1.0):
        return x
    if exponent != Constant(2.0):
        raise Unrecorded("a power other than 1 or 2")
    return e(Op.MUL, x, x)


def _nan_to_num(e, x, nan=None, posinf=None, neginf=None):
    if posinf is not None or neginf is not None:
        raise Unrecorded("nan_to_num with infinities")
    kept = _clamp(e, x, Constant(-e.largest.value), e.largest)
    return e(Op.WHERE, e(Op.EQ, x, x), kept, ZERO if nan is None else nan)


def _abs(e, x):
    return e(Op.MAX, x, e(Op.MUL, x, MINUS))


def _log_sigmoid(e, x):
    decay = e(Op.EXP, e(Op.MUL, _abs(e, x), MINUS))
    return e(Op.SUB, e(Op.MIN, x, ZERO), e(Op.LOG1P, decay))


def _not(e, x):
    return e(Op.EQ, x, ZERO)


OPERATIONS: dict[str, Callable[..., Operand]] = {
    # aten's add and sub take a factor; its min and max are of one tensor
    **{op.name.lower(): _plain(op) for op in COMPUTE if op not in (Op.MIN, Op.MAX)},
    "add": lambda e, a, b, alpha=ONE: e(Op.ADD, a, e(Op.MUL, b, alpha)),
    "sub": lambda e, a, b, alpha=ONE: e(Op.SUB, a, e(Op.MUL, b, alpha)),
    "rsub": lambda e, a, b, alpha=ONE: e(Op.SUB, b, e(Op.MUL, a, alpha)),
    "neg": lambda e, x: e(Op.MUL, x, MINUS),
    "reciprocal": lambda e, x: e(Op.DIV, ONE, x),
    "pow": _power,
    "abs": _abs,
    "sigmoid_backward": lambda e, g, y: e(Op.MUL, e(Op.MUL, g, e(Op.SUB, ONE, y)), y),
    "log_sigmoid_forward": _log_sigmoid,
    "log_sigmoid_backward": lambda e, g, x, _: e(Op.MUL, g, e(Op.SIGMOID, e(Op.MUL, x, MINUS))),
    "minimum": _plain(Op.MIN),
    "maximum": _plain(Op.MAX),
    "clamp": _clamp,
    "clamp_min": _plain(Op.MAX),
    "clamp_max": _plain(Op.MIN),
    "nan_to_num": _nan_to_num,
    "lt": lambda e, a, b: e(Op.GT, b, a),
    "le": lambda e, a, b: e(Op.GE, b, a),
    "ne": lambda e, a, b: _not(e, e(Op.EQ, a, b)),
    "masked_fill": lambda e, x, mask, value: e(Op.WHERE, mask, value, x),
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__"), _plain(Op.MIN)),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), _plain(Op.MAX)),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
}


# ---------------------------------------------------------------------- segments


def _recorded(name: str, adjoint: str) -> Any:
    """A linear map of segments, whose adjoint is another of them."""

    def run(segments: RecordedSegments, *values: Tensor) -> Any:
        there, back = (partial(segments.record, one) for one in (name, adjoint))
        return Linear.apply(there, back, *values)

    return run


PAIRS = {"join_pairs": (Op.PAIR,), "split_pairs": (Op.FIRST, Op.SECOND)}


class RecordedSegments(Segments):
    """Segments of a sample whose sums, expansions and pairs are recorded."""

    def __init__(self, recorder: Recorder, lengths: Tensor) -> None:
        ids = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
        super().__init__(ids, len(lengths), counts=lengths)
        self.recorder = recorder
        self._lengths = recorder.know(lengths.clone(), recorder.load(("lengths", None), SEGMENTS))

    sum, expand = _recorded("sum", "expand"), _recorded("expand", "sum")
    split_pairs = _recorded("split_pairs", "join_pairs")
    join_pairs = _recorded("join_pairs", "split_pairs")

    def record(self, name: str, *values: Tensor) -> Any:
        """A map on the nodes that values stand for. It gives zeros, since nothing reads values."""
        recorder, count, dtype = self.recorder, self.count, values[0].dtype
        operands = [recorder.of(v) for v in values]
        if name == "expand":
            made, count = [recorder.expand(*operands)], len(self.ids)
        elif name == "sum":
            made = [recorder.total(*operands)]
            dtype = dtype if dtype.is_floating_point else torch.int64
        else:
            registers = [recorder.register(o, SEGMENTS) for o in operands]
            made = [recorder(op, *registers) for op in PAIRS[name]]
        zeros = [torch.zeros(count // len(made), dtype=dtype, device="cpu") for _ in made]
        outs: Any = tuple(map(recorder.know, zeros, made))
        return outs if len(outs) > 1 else outs[0]
