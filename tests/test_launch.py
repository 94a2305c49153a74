"""Launches that leave out Triton's own work in each call: the key of a kernel, and what is sent."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from triton_cases import DEVICE

triton = pytest.importorskip("triton")

from headloss.kernels.triton import chosen, launch, merge  # noqa: E402

if DEVICE == "cpu":
    SIXTEEN = torch.zeros(64)
else:
    SIXTEEN = torch.zeros(64, device=DEVICE)

NUMBERS = [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31 - 16, 2**31, -(2**31), 2**31 + 1]
NUMBERS += [2**40, 2**40 + 1, 2**63 - 16, 2**63 - 1, 2**63, 1.0, 0.0, 2.5, True, False, None]


def specialized(value):
    """What Triton itself makes of an argument."""
    jit = triton.runtime.jit
    return jit.native_specialize_impl(jit.BaseBackend, value, False, True, True)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_numbers_that_triton_tells_apart(number):
    for other in NUMBERS:
        if specialized(number) != specialized(other):
            assert launch.kind(number) != launch.kind(other), other


def test_other_arguments_are_refused():
    with pytest.raises(TypeError, match="a kernel takes tensors"):
        launch.kind("3")


def test_tensors_by_dtype_and_alignment():
    tensors = [SIXTEEN[i:] for i in (0, 1, 2, 4, 8)]
    tensors += [SIXTEEN.to(dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)]
    describe = launch.describer((SIXTEEN, 3, SIXTEEN))
    keys = [describe({}, t, 3, SIXTEEN)[0] for t in tensors]
    for key, tensor in zip(keys, tensors, strict=True):
        for other, found in zip(keys, tensors, strict=True):
            if specialized(tensor) != specialized(found):
                assert key != other
    assert keys[0] == keys[3]  # 16 bytes on
    both = {describe({}, *a)[0] for a in ((SIXTEEN[1:], 3, SIXTEEN), (SIXTEEN, 3, SIXTEEN[1:]))}
    assert len(both) == 2


def test_constants_and_devices_are_told_apart(monkeypatch):
    describe = launch.describer((SIXTEEN,))
    keys = []
    for device in (0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _, device=device: device)
        keys += [describe({"A": a}, SIXTEEN)[0] for a in (True, False, 64)]
    assert len(set(keys)) == 6 and [key[0] for key in keys] == [0, 0, 0, 1, 1, 1]
    assert describe({"A": 1}, SIXTEEN)[1] == [SIXTEEN.data_ptr()]


class Stub:
    """A kernel, and what it is launched with, by way of Triton and directly."""

    arg_names = ("x", "n", "y", "BLOCK")

    def __init__(self) -> None:
        self.pre_run_hooks: list[object] = []
        self.slow: list[tuple] = []
        self.fast: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.slow.append((grid, args, kwargs))

    def known(self, compiled, count, tiles):
        def send(programs, _, __, stream, fixed, *values):
            assert fixed == "fixed" and values[-1] == "constant"
            self.fast.append((programs, stream, list(values[:-1])))

        layouts = [(3, 4, 7, list(tile.block)) for tile in tiles.values()]
        return launch.Known(send, ("fixed",), ("constant",), False, layouts, tiles, compiled)


@pytest.fixture
def stub(monkeypatch):
    kernel = Stub()
    monkeypatch.setitem(launch.VERSIONS, launch.version(), kernel.known)
    monkeypatch.setattr(launch, "_stream", lambda device: 70 + device)
    return kernel


def launched(launcher, device, programs, *arguments) -> None:
    """With tensors that say that they are on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "get_device", lambda _: device)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
        launcher(programs, *arguments, BLOCK=32)


def launcher_of(kernel, **options) -> launch.Launcher:
    launcher = launch.Launcher(kernel, **options)
    launch._launchers.remove(launcher)
    launcher.direct = True
    return launcher


def test_the_second_launch_is_direct(stub):
    launcher = launcher_of(stub, num_warps=8)
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.int64)
    for n in (5, 6, 16, 7):
        launched(launcher, 0, 9, x, n, y)
    assert [args[1] for _, args, _ in stub.slow] == [5, 16]
    assert stub.slow[0] == ((9,), (x, 5, y), {"BLOCK": 32, "num_warps": 8})
    pointers = (x.data_ptr(), y.data_ptr())
    assert stub.fast == [(9, 70, [pointers[0], n, pointers[1]]) for n in (6, 7)]
    launched(launcher, 1, 9, x, 5, y)  # another device
    assert len(stub.slow) == 3


def test_hooks_are_called_by_triton(stub, monkeypatch):
    launcher = launcher_of(stub)
    given = (0, 9, torch.zeros(64), 5, torch.zeros(64))
    launched(launcher, *given)
    hook = SimpleNamespace(calls=[print])
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        launched(launcher, *given)
    stub.pre_run_hooks.append(print)
    launched(launcher, *given)
    assert len(stub.slow) == 3 and not stub.fast
    stub.pre_run_hooks.clear()
    launched(launcher, *given)
    assert len(stub.fast) == 1


def test_what_only_triton_can_send(stub, monkeypatch):
    monkeypatch.setitem(launch.VERSIONS, launch.version(), lambda *_: None)
    launcher = launcher_of(stub)
    for _ in range(3):
        launched(launcher, 0, 9, torch.zeros(64), 5, torch.zeros(64))
    assert len(stub.slow) == 3 and len(launcher.known) == 1


def test_tiles_become_maps_shapes_and_strides(stub, monkeypatch):
    made = []

    def tensor_map(layout, pointer, shape, strides):
        made.append((layout, pointer, tuple(shape), tuple(strides)))
        return f"map {len(made)}"

    monkeypatch.setattr(launch, "_tensor_map", tensor_map)
    launcher = launcher_of(stub, tiles={"y": launch.Tile((16, 32))})
    x, y = torch.zeros(64), torch.zeros(40, 64)[:, :56]
    for rows in (40, 40, 24):
        launched(launcher, 0, 9, x, 5, y[:rows])
    assert type(stub.slow[0][1][2]).__name__ == "TensorDescriptor"
    assert stub.fast == [
        (9, 70, [x.data_ptr(), 5, f"map {i + 1}", rows, 56, 64, 1])
        for i, rows in enumerate((40, 24))
    ]
    assert made[1] == ((3, 4, 7, [16, 32]), y.data_ptr(), (24, 56), (64, 1))


def test_no_kernel_has_a_constant_before_an_argument():
    """Constants follow the arguments: the C launcher is given as many placeholders at the end."""
    for launcher in {turn for each in launch._launchers for turn in each.turns}:
        parameters = inspect.signature(launcher.kernel.fn).parameters.values()
        constant = ["constexpr" in str(p.annotation) for p in parameters]
        assert constant == sorted(constant), launcher.kernel
    assert {merge.launch_merge, chosen.launch_logits} <= set(launch._launchers)


def test_kernels_in_turn_are_described_once(stub, monkeypatch):
    monkeypatch.setattr(launch, "_tensor_map", lambda *_: "map")
    tiled = launcher_of(stub, tiles={"y": launch.Tile((16, 32))})
    turns = launch.Series(launcher_of(stub, num_warps=8), tiled)
    launch._launchers.remove(turns)
    x, y = torch.zeros(64), torch.zeros(40, 64)
    for _ in range(2):
        launched(turns, 0, (9, 3), x, 5, y)
    assert [grid for grid, *_ in stub.slow] == [(9,), (3,)]
    (_, _, plain), (_, _, as_map) = stub.fast
    assert plain == [x.data_ptr(), 5, y.data_ptr()]
    assert as_map == [x.data_ptr(), 5, "map", 40, 64, 64, 1]
    assert [programs for programs, *_ in stub.fast] == [9, 3]


def test_forgetting(stub):
    launcher = launcher_of(stub)
    launch._launchers.append(launcher)
    try:
        launched(launcher, 0, 9, torch.zeros(64), 5, torch.zeros(64))
        assert launcher.known
        launch.clear()
        assert not launcher.known
    finally:
        launch._launchers.remove(launcher)


class Inner(NamedTuple):
    data: torch.Tensor
    stride: int
    flag: triton.language.constexpr


class Outer(NamedTuple):
    inner: Inner
    other: Inner | None
    maybe: torch.Tensor | None
    number: float | None


YES, NO = triton.language.constexpr(True), triton.language.constexpr(False)
INNER = Inner(SIXTEEN, 4, YES)


def test_records_are_described_field_by_field():
    """All that Triton tells apart in a record, and its values in the shape that it has."""
    describe = launch.describer((SIXTEEN, Outer(INNER, None, None, None)))
    records = [
        Outer(inner, other, maybe, number)
        for inner in (INNER, INNER._replace(data=SIXTEEN[1:]), INNER._replace(stride=1))
        for other in (None, INNER, INNER._replace(flag=NO), INNER._replace(data=SIXTEEN[2:]))
        for maybe in (None, SIXTEEN, SIXTEEN.double(), SIXTEEN[1:])
        for number in (None, 0.5)
    ]
    keys = [describe({}, SIXTEEN, record)[0] for record in records]
    for (i, key), (j, other) in itertools.combinations(enumerate(keys), 2):
        assert (key == other) == (i == j)
    pointer = SIXTEEN.data_ptr()
    given = Outer(INNER, INNER._replace(stride=5), SIXTEEN, 0.5)
    values = describe({}, SIXTEEN, given)[1]
    assert values == [pointer, ((pointer, 4, YES), (pointer, 5, YES), pointer, 0.5)]
    again = describe({}, SIXTEEN, given._replace(number=2.5, inner=INNER._replace(stride=8)))
    assert again[0] == describe({}, SIXTEEN, given)[0]
