"""What a causal language model of no table does to its logits: told by one forward of it.

V vocabulary. In that forward the head's module hands on numbers that are chosen, from -16 to 16, so
that a soft cap shows however small the model's own logits are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..head.head import Head
from ..head.reading import FAMILIES, unwrap

LARGEST = 16.0
TOKENS = 4
# Families that do to their hidden states, before the head, what `Head.of_model` does to the logits.
BEFORE_THE_HEAD: dict[str, dict[str, Any]] = {"minicpm3": {"logit_scale": 1.0}}


def causal_of(model: nn.Module) -> nn.Module:
    """The model inside wrappers and PEFT's."""
    model = unwrap(model)
    return unwrap(model.get_base_model()) if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def transform_of(causal: nn.Module) -> dict[str, Any]:
    """Arguments of `Head.of_model`, for the hidden states that the head's module is given."""
    kind: Any = getattr(getattr(causal, "config", None), "model_type", None)
    return {**learn(causal, "head"), **BEFORE_THE_HEAD.get(kind, {})}


def learn(model: nn.Module, hidden: Literal["base", "head"] = "base") -> dict[str, Any]:
    """Arguments of `Head.of_model` that a model needs, `softcap` and `logit_scale`.

    Nothing is needed, and nothing runs, for a family that `Head.of_model` knows. Another model is
    run once, in eval mode and without gradients, on a few tokens. A soft cap is the config's.

        headloss.Head.of_model(model, **learn(model))

    Args:
        model: a causal language model of Hugging Face Transformers.
        hidden: the hidden states that the head is for: those that the base model gives, or those
            that the head's module is given.

    Raises:
        ValueError: a model that cannot be run here, or does something else to its logits.
        TypeError: as for `Head.of`.
    """
    causal: Any = causal_of(model)
    kind = getattr(getattr(causal, "config", None), "model_type", None)
    head = getattr(causal, "get_output_embeddings", lambda: None)()
    if kind in FAMILIES or kind is None or head is None:
        return {}
    what = f"model: got {type(causal).__name__} of model_type {kind!r}, which is in no table"
    if reason := _not_to_run(causal):
        raise ValueError(
            f"{what} and {reason}, so that no forward can tell what it does to its logits; call "
            "this before, or pass headloss.Head(weight, bias, softcap=..., logit_scale=...)"
        )
    Head.of(head)
    try:
        raw, logits, states = _run(causal, head)
    except Exception as error:
        raise ValueError(
            f"{what}; a forward of a few tokens, to tell what it does to its logits, ended in "
            f"{type(error).__name__}: {error}"
        ) from error
    if hidden == "base" and not (states[0] is not None and torch.equal(*states)):  # type: ignore[arg-type]
        raise ValueError(f"{what}: its head is given other hidden states than its base model's")
    return _explained(what, raw, logits, causal.config)


def _not_to_run(model: nn.Module) -> str:
    for parameter in model.parameters():
        if parameter.is_meta:
            return "has weights on the meta device"
        if hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor"):
            return "is sharded"
    return ""


# ---------------------------------------------------------------------- a forward


def chosen(rows: torch.Size, vocabulary: int, like: Tensor) -> Tensor:
    """[*rows, V] raw logits in the dtype and on the device of `like`."""
    ends = -LARGEST, LARGEST
    row = torch.linspace(*ends, vocabulary, dtype=torch.float32, device=like.device)
    return row.to(like.dtype).expand(*rows, vocabulary).contiguous()


def _run(model: Any, head: nn.Module) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor]]:
    """Raw logits, final logits, and hidden states: the base model's, and the head's own."""
    handed: list[tuple[Tensor, Tensor]] = []
    states: list[Tensor] = []

    def at_head(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        raw = chosen(output.shape[:-1], output.shape[-1], output)
        handed.append((raw, args[0]))
        return raw.clone()

    base = getattr(model, "base_model", model)
    base = getattr(model, "model", None) if base is model else base
    hooks = [head.register_forward_hook(at_head)]
    if isinstance(base, nn.Module):
        hooks.append(base.register_forward_hook(lambda _, args, output: states.append(output[0])))
    embeddings = model.get_input_embeddings().weight
    ids = torch.tensor([_plain_ids(model.config)], device=embeddings.device)
    try:
        with torch.no_grad(), _evaluating(model):
            logits = model.forward(input_ids=ids).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(handed) != 1:
        raise RuntimeError(f"it called its output embeddings {len(handed)} times, want once")
    raw, hidden = handed[0]
    return raw, logits, (states[0] if len(states) == 1 else None, hidden)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _plain_ids(config: Any) -> list[int]:
    """Of tokens that are no image's, say."""
    named = [number for name, number in _numbers(config.to_dict()) if "token" in name]
    return [i for i in range(len(named) + TOKENS) if i not in named][:TOKENS]


def _numbers(settings: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a config, those of its parts among them."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _numbers(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _numbers(value, name)
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        yield name, settings


# ---------------------------------------------------------------------- what it says


def final(raw: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    """[.., V] what a head's formula makes of raw logits, in float32."""
    z = raw.float() * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def agree(logits: Tensor, raw: Tensor, softcap: float | None, logit_scale: float) -> bool:
    """Whether they are the formula of `raw`, within what the dtype of `raw` rounds."""
    rounding = 4 * torch.finfo(raw.dtype).eps + 1e-5
    want = final(raw, softcap, logit_scale)
    return logits.shape == raw.shape and torch.allclose(
        logits.float(), want, rtol=rounding, atol=1e-6
    )


def _explained(what: str, raw: Tensor, logits: Tensor, config: Any) -> dict[str, Any]:
    if logits.shape != raw.shape:
        raise ValueError(
            f"{what}: its head gives logits of shape {tuple(raw.shape)}, it {tuple(logits.shape)}"
        )
    numbers = [(n, abs(v)) for n, v in _numbers(config.to_dict()) if v and math.isfinite(v)]
    caps = list(dict.fromkeys(value for name, value in numbers if "cap" in name))
    for softcap in (None, *caps):
        factor = _factor(raw, logits, softcap)
        near = 1e-5 + torch.finfo(raw.dtype).eps / 4  # of a mean of rounded ratios
        values = [v for _, value in numbers for v in (value, 1 / value)]
        closest = min((1.0, *values), key=lambda value: abs(value - factor))
        if abs(closest - factor) <= near * abs(factor):
            factor = closest
        elif torch.finfo(raw.dtype).bits < 32:
            continue  # too coarse to be told by its logits
        if agree(logits, raw, softcap, factor):
            return {"softcap": softcap, "logit_scale": factor}
    pairs = ", ".join(f"{a:.4g} -> {b:.4g}" for a, b in _some(raw, logits))
    raise ValueError(
        f"{what}: between its raw and its final logits is neither one factor nor a soft cap of its "
        f'config (numbers with "cap" in the name: {caps or "none"}): {pairs}; pass them to '
        "headloss's verbs by hand"
    )


def _factor(raw: Tensor, logits: Tensor, softcap: float | None) -> float:
    """The mean ratio, where a soft cap lets one be told."""
    x, z = raw.double().flatten().cpu(), logits.double().flatten().cpu()
    if softcap is not None:
        open_ = z.abs() < 0.9 * softcap
        x, z = x[open_], softcap * torch.atanh(z[open_] / softcap)
    power = (x * x).sum()
    return float((x * z).sum() / power) if power > 0 else math.nan


def _some(raw: Tensor, logits: Tensor) -> list[tuple[float, float]]:
    places = [0, raw.shape[-1] // 2, -1]
    x, z = (t.reshape(-1, t.shape[-1])[0, places].tolist() for t in (raw, logits))
    return list(zip(x, z, strict=True))
