"""Launching a compiled kernel without what Triton does anew in each call.

`kernel[grid](...)` binds its arguments by name, describes each and looks up the compiled kernel by
a string made of them all, which takes a host 20 to 30 microseconds, and 80 with three descriptors.
A `Launcher` keeps what Triton answered under a key that is at least as fine as Triton's own, and
calls the compiled kernel's launcher in C at once. The C launchers of two versions of Triton are
known here (`VERSIONS`); with another one, in the interpreter and while somebody has hooks on
launches, every launch goes through `kernel[grid](...)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .versions import version

INT32, INT64 = 1 << 31, 1 << 63
MOST_MAPS = 256  # of one kernel that are kept: addresses repeat from step to step

Values = Sequence[Any]
Describe = Callable[..., tuple[tuple[Any, ...], list[Any]]]


def cdiv(n: int, step: int) -> int:
    """n / step, rounded up. (Triton's own also runs in kernels, and takes ten microseconds.)"""
    return -(-n // step)


def is_watched() -> Any:
    """Whether somebody has hooks on launches, a profiler, say."""
    runtime = triton.knobs.runtime  # type: ignore[attr-defined]
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


class Tile(NamedTuple):
    """How a kernel cuts a matrix [n, v] that it reads or writes through the tensor memory
    accelerator."""

    block: tuple[int, int]
    layout: Any = None  # in shared memory, for Gluon

    def descriptor(self, tensor: Tensor) -> Any:
        """What Triton takes."""
        if self.layout is None:
            return TensorDescriptor.from_tensor(tensor, list(self.block))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OfGluon

        return OfGluon.from_tensor(tensor, list(self.block), self.layout)


class Launcher:
    """A kernel under fixed options (num_warps, .., constexprs), launched over one row of programs.

    launcher(programs, *arguments, **constants) is kernel[(programs,)](*arguments, **constants): the
    arguments in the kernel's order, of which each is always a tensor, always a number or always a
    record (`records`), then the constexprs by name and always in the same order. The first argument
    is a tensor, or the first field of the first one; the launch is on its device and that device's
    current stream. Tensors are not checked to be on a GPU.

    Args:
        tiles: which arguments are given as tensors and reach the kernel as descriptors.
    """

    describe: Describe | None = None

    def __init__(self, kernel: Any, *, tiles: dict[str, Tile] | None = None, **options: Any):
        self.kernel, self.options = kernel, options
        if isinstance(kernel, JITFunction):  # a multiplication and an addition are one instruction
            options["enable_fp_fusion"] = True
        given = tiles or {}
        self.tiles = {i: given[name] for i, name in enumerate(kernel.arg_names) if name in given}
        self.direct = isinstance(kernel, JITFunction) and version() in VERSIONS
        self.turns: tuple[Launcher, ...] = (self,)
        self.known: dict[tuple[Any, ...], list[tuple[Launcher, Known | None]]] = {}
        _launchers.append(self)

    def __call__(self, programs: int | Sequence[int], *arguments: Any, **constants: Any) -> None:
        describe = self.describe
        if describe is None:
            describe = self.describe = describer(arguments)
        key, values = describe(constants, *arguments)
        known, device = self.known.get(key), key[0]
        counts = (programs,) if type(programs) is int else programs
        if 0 <= device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(programs, *arguments, **constants)
        watched = is_watched()
        if known is None or watched:
            turns = zip(self.turns, counts, strict=True)
            made = [(turn._slowly(n, arguments, constants), turn) for turn, n in turns]
            if self.direct and device >= 0 and not watched:
                ready, n = VERSIONS[version()], len(arguments)
                known = self.known[key] = [(t, ready(one, n, t.tiles)) for one, t in made]
        else:
            stream = _stream(device)
            for (turn, ready), count in zip(known, counts, strict=True):
                if ready is None or turn.kernel.pre_run_hooks:
                    turn._slowly(count, arguments, constants)
                else:
                    ready.send(count, stream, values, arguments)

    def _slowly(self, programs: int, arguments: Values, constants: dict[str, Any]) -> Any:
        given = list(arguments)
        for i, tile in self.tiles.items():
            given[i] = tile.descriptor(given[i])
        return self.kernel[(programs,)](*given, **constants, **self.options)


class Series(Launcher):
    """Kernels that take the same arguments and constexprs, launched one after another: these are
    described once. Called with the programs of each."""

    def __init__(self, *turns: Launcher):
        self.turns, self.known = turns, {}
        self.direct = all(turn.direct for turn in turns)
        _launchers.append(self)


class OfClusters(Launcher):
    """A launcher of a kernel whose programs, `parts` times as many as are asked for, stand in
    clusters of `parts` blocks. To the compiler each is a program of its own, where `num_ctas`
    would have it spread every tensor over the blocks."""

    def __init__(self, kernel: Any, parts: int, **options: Any):
        super().__init__(kernel, **options)
        self.parts = parts

    def _slowly(self, programs: int, arguments: Values, constants: dict[str, Any]) -> Any:
        if isinstance(self.kernel, JITFunction):
            given = {"grid": (programs,), **constants, **self.options}
            compiled = self.kernel.warmup(*arguments, **given)
            warps, _, shared = compiled.packed_metadata
            compiled.packed_metadata = (warps, self.parts, shared)
        return super()._slowly(programs, arguments, constants)


class OfNumbers(Launcher):
    """A launcher of a kernel whose arguments are one tensor and numbers, none of which is
    specialized: it is compiled once for its constants, whatever the arguments are."""

    @staticmethod
    def describe(constants: dict[str, Any], first: Tensor, *numbers: Any) -> Any:
        return (first.get_device(), *constants.values()), [first.data_ptr(), *numbers]


def describer(arguments: Values) -> Describe:
    """A function of (constants, *arguments) that finds all that Triton may compile another kernel
    for, the device first, and what the C launcher takes, tiles as pointers.

    Of a pointer, its dtype and its address modulo 16 count; of a number see `kind`. A loop over the
    arguments would take three times as long as a function that is written for them.
    """
    names = [f"a{i}" for i in range(len(arguments))]
    lines, key, lows, values = [], [], [], []
    for name, argument in zip(names, arguments, strict=True):
        value = name
        if isinstance(argument, tuple):
            value, counts = _describe_record(name, type(argument), lines, lows)
            key += counts
        elif not isinstance(argument, Tensor):
            key.append(f"kind({name})")
        else:
            value = f"p{name}"
            key.append(f"{name}.dtype")
            lines.append(f"p{name} = {name}.data_ptr()")
            lows.append(value)
        values.append(value)
    first = lows[0].removeprefix("p")
    each = "".join(f"{low} & 15, " for low in lows)
    lines += [
        f"low = ({' | '.join(lows)}) & 15",
        f"key = {first}.get_device(), {', '.join(key)}, low and ({each}), *constants.values()",
        f"return key, [{', '.join(values)}]",
    ]
    head = f"def describe(constants, {', '.join(names)}):"
    found: dict[str, Any] = {"kind": kind}
    exec("\n    ".join([head, *lines]), found)
    return found["describe"]


def _describe_record(
    name: str, record: type, lines: list[str], lows: list[str] | None
) -> tuple[str, list[str]]:  # fmt: skip
    """Lines that find a record's value for the C launcher; its name, and all that counts of it. A
    field that may be None says so in its annotation. Pointers go to `lows`, or without it, to what
    counts by their alignment."""
    fields = [f"{name}_{i}" for i in range(len(get_type_hints(record)))]
    lines.append(f"{', '.join(fields)}, = {name}")
    keys, values = [], []
    for field, hint in zip(fields, get_type_hints(record).values(), strict=True):
        kinds = get_args(hint) or (hint,)
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, tuple)), None)
        if inner is not None:
            here: list[str] = []
            optional = type(None) in kinds
            value, counts = _describe_record(field, inner, here, None if optional else lows)
            if optional:
                lines.append(f"k{field} = {value} = None")
                here.append(f"k{field} = ({', '.join(counts)},)")
                here = [f"if {field} is not None:", *(f"    {line}" for line in here)]
                counts = [f"k{field}"]
            lines += here
            keys += counts
        elif Tensor in kinds:
            value = f"p{field}"
            if type(None) in kinds:  # what is 0 here is a constant to the kernel
                lines.append(f"{value} = 0 if {field} is None else {field}.data_ptr()")
                keys.append(f"None if {field} is None else {field}.dtype")
            else:
                lines.append(f"{value} = {field}.data_ptr()")
                keys.append(f"{field}.dtype")
            if lows is None:
                keys.append(f"{value} & 15")
            else:
                lows.append(value)
        elif tl.constexpr in kinds:
            value = field
            keys.append(f"{field}.value")
        else:
            value = field
            keys.append(f"kind({field})")
        values.append(value)
    lines.append(f"v{name} = ({', '.join(values)},)")
    return f"v{name}", keys


@functools.lru_cache(maxsize=4096, typed=True)
def kind(number: float | None) -> Any:
    """What Triton distinguishes of an argument that is no tensor.

    An integer of 1 is a constant; of another it counts whether 16 divides it and whether it fits
    into 32 bits.
    """
    if type(number) is int:
        narrow = -INT32 <= number < INT32
        return 1 if number == 1 else (narrow, number < INT64, number % 16 == 0)
    if number is None or type(number) in (float, bool):
        return type(number)
    raise TypeError(f"a kernel takes tensors, int, float, bool and None, got {number!r}")


class Known:
    """A compiled kernel, ready to be sent: Triton's launcher in C takes the programs, the stream,
    what is `fixed`, and the arguments and constants, one by one or as one tuple (`packed`)."""

    def __init__(
        self, launch: Any, fixed: Values, constants: Values, packed: bool, layouts: list[Values],
        tiles: dict[int, Tile], compiled: object
    ) -> None:  # fmt: skip
        self.launch, self.fixed, self.constants, self.packed = launch, fixed, constants, packed
        # Of a tile in shared memory: its swizzle, the size and the type of its elements, its block.
        self.layouts = dict(zip(tiles, layouts, strict=True))
        self.tiles = {i: tiles[i] for i in reversed(tiles)}
        self.compiled = compiled  # it is unloaded when nobody holds it
        self.maps: dict[tuple[Any, ...], list[Any]] = {}

    def send(self, programs: int, stream: int, values: Values, arguments: Values = ()) -> None:
        """Launch it with numbers and addresses; `arguments` are the tiles, or begin with them."""
        given = self._with_maps(values, arguments) if self.tiles else values
        if self.packed:
            self.launch(programs, 1, 1, stream, *self.fixed, (*given, *self.constants))
        else:
            self.launch(programs, 1, 1, stream, *self.fixed, *given, *self.constants)

    def _with_maps(self, values: Values, arguments: Values) -> Values:
        """`values` with each tile as the C launcher takes it: its map, its shape and strides."""
        found, maps = [*values], self.maps
        for i in self.tiles:  # the last one first, so that the others stay where they are
            tensor = arguments[i]
            key = i, found[i], tensor.shape, tensor.stride()
            if (made := maps.get(key)) is None:
                made = self._with_map(*key, tensor)
            found[i : i + 1] = made
        return found

    def _with_map(self, i: int, pointer: int, shape: Values, strides: Values, of: Tensor) -> Any:
        self.tiles[i].descriptor(of)  # it checks
        if len(self.maps) >= MOST_MAPS:
            self.maps.clear()
        made = _tensor_map(self.layouts[i], pointer, shape, strides), *shape, *strides
        self.maps[i, pointer, shape, strides] = made
        return made


def _tensor_map(layout: Values, pointer: int, shape: Values, strides: Values) -> Any:
    """The 128 bytes by which the hardware knows a matrix."""
    utils = triton.runtime.driver.active.utils
    fill = utils.fill_tma_descriptor if version() == "3.6" else utils.fill_tma_descriptor_tiled
    return fill(pointer, *layout, list(shape), list(strides), 0)


_launchers: list[Launcher] = []
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # there where CUDA is


def clear() -> None:
    """Forget every compiled kernel and every map."""
    for launcher in _launchers:
        launcher.known.clear()
    kind.cache_clear()


# ---------------------------------------------------------------------- versions of Triton

Sender = Callable[[Any], tuple[Any, Values, bool] | None]


def _known(sender: Sender, compiled: Any, count: int, tiles: dict[int, Tile]) -> Known | None:
    """A compiled kernel of `count` arguments, or None where only Triton can send it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, CudaLauncher

    run = getattr(compiled, "run", None)
    if type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return None
    given = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if len(given) != len(tiles):  # it makes no use of the accelerator
        return None
    if any(not m or m["fp4_padded"] or m.get("is_im2col") for m in given):
        return None
    types = TMA_DTYPE_DEVICE_TO_HOST
    layouts = [
        (m["swizzle"], m["elem_size"], types[m["elem_type"]], list(m["block_size"])) for m in given
    ]
    found = sender(compiled)
    if found is None:
        return None
    constants = (None,) * (len(compiled.src.fn.arg_names) - count)  # the C launcher skips them
    launch, fixed, packed = found
    return Known(launch, fixed, constants, packed, layouts, tiles, compiled)


def _sender_3_6(compiled: Any) -> tuple[Any, Values, bool] | None:
    """A launcher of its own for each signature; one for descriptors is behind a Python function."""
    run = compiled.run
    launch, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl
    if inspect.isfunction(launch):
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    if not inspect.isbuiltin(launch):
        return None
    scratch, seen, hooks = (None, None), (None,), (None, None)
    fixed = (compiled.function, cooperative, dependent, *scratch, compiled.packed_metadata)
    return launch, (*fixed, *seen, *hooks), False


def _sender_3_9(compiled: Any) -> tuple[Any, Values, bool] | None:
    """One launcher for all kernels, which is told each one's signature."""
    run = compiled.run
    if run.gsan_enabled:
        return None
    launch = triton.runtime.driver.active.utils.launch
    scratch, seen, hooks = (None, None), (None,), (None, None)
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    fixed += (compiled.packed_metadata, *seen, *hooks, *scratch)
    return launch, (*fixed, run.arg_annotations, run.kernel_signature), True


VERSIONS: dict[str, Callable[[Any, int, dict[int, Tile]], Known | None]] = {
    "3.6": functools.partial(_known, _sender_3_6), "3.9": functools.partial(_known, _sender_3_9)
}
