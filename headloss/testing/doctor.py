"""Output of `headloss doctor`: the abilities of this machine and the supported framework
versions."""

from __future__ import annotations

import platform

import torch

from .. import __version__, kernels
from ..integrations.seams import fits
from ..integrations.seams import release as _version

EXTRAS = {
    "trl": ("trl", "transformers", "peft", "accelerate"),
    "train": ("jinja2", "matplotlib", "omegaconf", "reasoning-gym", "rich"),
}


def report() -> list[str]:
    """Return lines on versions, GPU, backend per dtype, missing packages and frameworks."""
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    place = device or torch.device("cpu")
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    backends = [kernels.choose("auto", place, dtype) for dtype in dtypes]
    lacks = {extra: [n for n in names if _version(n) is None] for extra, names in EXTRAS.items()}
    missing = [_without_triton(device)]
    missing += [f"for headloss[{extra}]: {', '.join(n)}" for extra, n in lacks.items() if n]
    return [
        f"headloss  {__version__}, Python {platform.python_version()}",
        f"torch     {torch.__version__}",
        f"triton    {_version('triton') or 'not installed'}",
        f"GPU       {described(device)}",
        *(f"{str(d)[6:]:<9} {b}" for d, b in zip(dtypes, backends, strict=True)),
        f"product   {_product(place, backends[0])}",
        f"extras    {', '.join(extra for extra in lacks if not lacks[extra]) or 'none'}",
        f"missing   {'; '.join(filter(None, missing)) or 'nothing'}",
        *(f"{package:<14} {fit}" for package, fit in fits().items()),
    ]


def _without_triton(device: torch.device | None) -> str | None:
    if device is None:
        return "a GPU that torch sees"
    try:
        kernels.choose("triton", device, torch.bfloat16)
    except ValueError as error:
        return str(error)
    return None


def described(device: torch.device | None) -> str:
    if device is None:
        return "none"
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / (1 << 30):.0f} GiB"


def _product(device: torch.device, backend: str) -> str:
    """Return the name of the kernel that multiplies hidden states with a bfloat16 head."""
    if backend == "reference":
        return "PyTorch's"
    from ..kernels.triton.versions import overlaps

    overlapping = overlaps(device)
    return "Triton's, whose epilogue overlaps with the next tile" if overlapping else "Triton's"
