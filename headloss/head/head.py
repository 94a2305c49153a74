"""The head of a language model: from hidden states to logits.

V vocabulary rows, H hidden width, r the rank of an adapter; [..] is any shape of tokens. The logits
z are computed from hidden states in two steps:

    raw = hidden @ weight.T + bias + sum over adapters of scaling * dropout(hidden) @ a.T @ b.T
        + sum over the pairs (features, weight2) in `beside` of features @ weight2.T
    z   = softcap * tanh(raw * logit_scale / softcap) / temperature

`logit_scale`, `softcap` and `temperature` are constants without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from ..arguments import LARGEST, brief, check_dense, check_device, is_dtensor, plain_numbers
from ..kernels.transform import Transform
from .products import Products, WideLinear, sum_dtype
from .reading import Fields, read_model, read_module

Dropout = Callable[[Tensor, float], Tensor]
GATHER = (
    "call inside the forward of the module that FSDP2 wraps, where the weight is whole, or gather "
    'it with full_tensor(grad_placements=[Partial("avg")] * device_mesh.ndim), whose backward '
    "averages the ranks' gradients as FSDP2 does; that of a plain full_tensor() drops those of "
    "the other ranks"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lora:
    """A low-rank adapter of the head: raw += scaling * dropout(hidden) @ a.T @ b.T.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685. Gradients flow to the matrices `a` and `b`;
    the merged weight, weight + scaling * b @ a, is never built.

    Attributes:
        a: [r, H], the down projection; its output stays in float32 or float64.
        b: [V, r], the up projection.
        scaling: alpha / r, or alpha / sqrt(r) for rank-stabilised adapters.
        dropout: probability in [0, 1) of dropping an input feature. Every call applies dropout;
            `Head.of` sets `dropout` to 0 for a module in eval mode.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_matrix("lora.a", self.a, "[r, H]")
        check_matrix("lora.b", self.b, "[V, r]")
        if self.b.shape[1] != self.a.shape[0]:
            raise _misfit("lora.b", self.b, f"[V, {self.a.shape[0]}]", self.a, "a")
        if self.b.dtype != self.a.dtype:
            raise ValueError(f"lora.b: got {self.b.dtype}, want the dtype of a, {self.a.dtype}")
        plain_numbers(self, "scaling", "dropout")
        check_constant("lora.scaling", self.scaling)
        if not 0 <= check_constant("lora.dropout", self.dropout) < 1:
            raise ValueError(f"lora.dropout: got {self.dropout}, want 0 <= dropout < 1")

    def features(
        self, hidden: Tensor, dropout: Dropout = F.dropout, products: Products | None = None
    ) -> Tensor:
        """Return scaling * dropout(hidden) @ a.T, [T, H] to [T, r], in float32 or float64."""
        if self.dropout:
            hidden = dropout(hidden, self.dropout)
        return self.scaling * WideLinear.apply(hidden, self.a, products)


@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """The linear head of a language model, made from a weight, or by `Head.of` or `Head.of_model`.

    Shapes: a weight [V, H] maps hidden states [.., H] to logits [.., V].

    FSDP2 gathers parameters inside the forward of the wrapped module: make the head and call
    headloss in this forward. Outside of the forward, gather parameters with
    `full_tensor(grad_placements=[Partial("avg")] * device_mesh.ndim)`; a plain `full_tensor()`
    drops the gradients of other ranks' data.

    Attributes:
        weight: [V, H], of a floating dtype. The `weight` of a LoRA-wrapped module is the base
            layer's weight alone; `Head.of` also reads the adapters.
        bias: [V], or None.
        temperature: a number, a 0-dim tensor, or a tensor with one value per token, in the shape of
            the targets; finite and > 0 at scored positions.
        softcap: z = softcap * tanh(z / softcap), or None.
        logit_scale: a factor of the raw logits.
        vocab_size: the number of vocabulary rows; further rows of the weight are padding.
        vocab_group: process group over whose ranks the vocabulary is sharded, in rank order;
            `weight` is this rank's vocabulary shard.
        vocab_mesh_dim: the mesh dimension over which the rows of a DTensor weight are sharded.
        lora: adapters that are added to the raw logits.
        beside: pairs (features [.., r] with a row for each position, weight2 [V, r]). The raw
            logits become hidden @ weight.T plus the sum of features @ weight2.T over all pairs, as
            for a head with hidden states [hidden | features] and weight [weight | weight2]. The
            tensors `features` and `weight2` receive gradients if they require gradients.

    Raises:
        TypeError: an argument of the wrong kind; a quantised weight.
        ValueError: a shape, dtype or value that does not fit.

    >>> import torch, headloss as hl
    >>> hl.Head(torch.zeros(10, 4), temperature=0.8, vocab_size=9).vocabulary
    9
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    _: KW_ONLY
    vocab_group: distributed.ProcessGroup | None = None
    vocab_mesh_dim: str | None = None
    lora: tuple[Lora, ...] = ()
    beside: tuple[tuple[Tensor, Tensor], ...] = ()

    def __post_init__(self) -> None:
        check_matrix("weight", self.weight, "[V, H]")
        if self.bias is not None:
            _check_floating("bias", self.bias, "[V] or None")
            if self.bias.shape != self.weight.shape[:1]:
                raise _misfit("bias", self.bias, f"({self.weight.shape[0]},)", self.weight)
        plain_numbers(self, "temperature", "softcap", "logit_scale", "vocab_size")
        check_transform(self.temperature, self.softcap, self.logit_scale)
        rows, width = self.weight.shape
        if (size := self.vocab_size) is not None:
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"vocab_size: got {describe(size)}, want an integer or None")
            # A vocabulary shard may hold fewer rows than `vocab_size`.
            sharded = self.vocab_group is not None or self.vocab_mesh_dim is not None
            if size < 1 or (size > rows and not sharded):
                raise ValueError(
                    f"vocab_size: got {size}, want 1 <= vocab_size <= {rows}, the rows"
                )
        if not isinstance(self.lora, tuple) or not all(isinstance(x, Lora) for x in self.lora):
            raise TypeError(f"lora: got {describe(self.lora)}, want a tuple of headloss.Lora")
        for index, lora in enumerate(self.lora):
            if lora.a.shape[1] != width:
                raise _misfit(f"lora[{index}].a", lora.a, f"[r, {width}]", self.weight)
            if lora.b.shape[0] != rows:
                raise _misfit(f"lora[{index}].b", lora.b, f"[{rows}, r]", self.weight)
        if not isinstance(self.beside, tuple):
            raise TypeError(f"beside: got {describe(self.beside)}, want ((features, weight2), ..)")
        for index, pair in enumerate(self.beside):
            name = f"beside[{index}]"
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"{name}: got {describe(pair)}, want (features, weight2)")
            _check_floating(name, pair[0], "[.., r] of features")
            check_matrix(name, pair[1], "[V, r] of weight2")
            if pair[1].shape != (rows, pair[0].shape[-1]):
                raise _misfit(name, pair[1], f"{(rows, pair[0].shape[-1])}", self.weight)

    def __repr__(self) -> str:
        """Return the arguments that differ from the defaults; tensors by shape and dtype."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        shown = (f"{f.name}={brief(x)}" for f, x in values if x is not f.default)
        return f"Head({', '.join(shown)})"

    @classmethod
    def of(cls, module: torch.nn.Module, **overrides: Any) -> Head:
        """Return the head of a module; `overrides` are arguments of `Head` that replace values of
        the module.

        Supported modules are `nn.Linear`, `nn.Embedding` (a tied head) and both types under PEFT:
        LoRA layers with any number of active, merged or disabled adapters, and `modules_to_save`.

        Raises:
            TypeError: the module is quantised, parametrised or has hooks, or its adapter is DoRA or
                another adapter than LoRA.
        """
        return cls(**{**_with_adapters(read_module(module)), **overrides})

    @classmethod
    def of_model(cls, model: torch.nn.Module, **overrides: Any) -> Head:
        """Return the head of a Hugging Face causal language model, with the model's soft cap and
        logit scale.

        DDP, FSDP, `torch.compile` and `PeftModel` wrappers are removed. `overrides` are arguments
        of `Head` that replace values of the model; with both `softcap` and `logit_scale`, any model
        type is accepted. The head expects the hidden states of the base model after the last norm.

        Raises:
            ValueError: an unknown model type, or a model without a head.
            TypeError: as for `Head.of`.
        """
        told = {"softcap", "logit_scale"} <= overrides.keys()
        return cls(**{**_with_adapters(read_model(model, told)), **overrides})

    @property
    def vocabulary(self) -> int:
        """The number of vocabulary rows of the weight, without padding rows."""
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size

    def factors(
        self, hidden: Tensor, dropout: Dropout = F.dropout, products: Products | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return (features [T, k], rows [V, k]) pairs whose products sum to the raw logits without
        the bias.

        The first returned pair is (hidden states, the head's weight). Each LoRA adapter adds a pair
        (features, rows), in the adapter's dtype, and each element of `Head.beside` adds a pair
        (features, rows). An adapter's features are made from LoRA's matrix A by autograd, so that A
        receives its gradient. The rows include padding.
        """
        return [
            (hidden, self.weight),
            *((x.features(hidden, dropout, products), x.b) for x in self.lora),
            *((x.reshape(-1, x.shape[-1]), w) for x, w in self.beside),
        ]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [.., H] to [.., vocabulary], in float32 (float64 for float64 hidden
        states).

        Differentiable. The logits of all positions are stored: for tests and small inputs.
        """
        self.validate(hidden)
        dtype = sum_dtype(hidden.dtype)
        rows = slice(self.vocabulary)
        z = hidden.new_zeros((), dtype=dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for features, weight in self.factors(hidden.reshape(-1, hidden.shape[-1])):
                z = z + F.linear(features.to(dtype), weight[rows].to(dtype))
        z = z.view(*hidden.shape[:-1], self.vocabulary)
        if self.bias is not None:
            z = z + self.bias[rows].to(dtype)
        z = z * self.logit_scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        t = self.temperature
        return z / (t.to(dtype).unsqueeze(-1) if isinstance(t, Tensor) else t)

    def validate(
        self,
        hidden: Tensor,
        *,
        token_shape: torch.Size | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Check that the head fits the hidden states of a call.

        Args:
            hidden: [.., H].
            token_shape: the shape of the targets; default: `hidden.shape[:-1]`.
            compute_dtype: the dtype to which autocast casts `hidden` and `weight`, whose own dtypes
                may then differ; None without autocast.

        Raises:
            TypeError, ValueError: for a misfit; the message names the argument, the given value and
                the wanted value.
        """
        _check_floating("hidden", hidden, "[.., H]")
        if hidden.dim() == 0 or hidden.shape[-1] != self.weight.shape[1]:
            are_logits = hidden.dim() > 0 and hidden.shape[-1] == self.vocabulary
            hint = " (logits? headloss.logits_loss takes them)" if are_logits else ""
            raise _misfit("hidden", hidden, f"[.., {self.weight.shape[1]}]{hint}", self.weight)
        if compute_dtype is None and hidden.dtype != self.weight.dtype:
            # Autocast does not cast float64 hidden states.
            way_out = "" if hidden.dtype == torch.float64 else " or run under torch.autocast"
            raise ValueError(
                f"hidden: got {hidden.dtype}, want the dtype of weight, {self.weight.dtype}; cast "
                f"one of them{way_out}"
            )
        named = [("weight", self.weight), ("bias", self.bias), ("temperature", self.temperature)]
        named += [(f"lora[{i}].{n}", getattr(x, n)) for i, x in enumerate(self.lora) for n in "ab"]
        named += [(f"beside[{i}]", x) for i, pair in enumerate(self.beside) for x in pair]
        for i, (features, _) in enumerate(self.beside):
            if features.shape[:-1] != hidden.shape[:-1]:
                raise _misfit(f"beside[{i}]", features, "a row each", hidden, "hidden states")
        for name, value in named:
            if not isinstance(value, Tensor):
                continue
            if is_dtensor(value):
                raise TypeError(
                    f"{name}: got a DTensor placed {getattr(value, 'placements', ())}, want a "
                    f"plain tensor; {GATHER}; or pass this rank's rows with vocab_group"
                )
            check_device(name, value, hidden, "that of hidden,")
        check_one_per_token(
            self.temperature, hidden.shape[:-1] if token_shape is None else token_shape
        )


def _with_adapters(fields: Fields) -> Fields:
    return {**fields, "lora": tuple(Lora(**adapter) for adapter in fields.get("lora", ()))}


def transform_of(head: Head) -> Transform:
    """Return the transform of a head's raw logits."""
    return Transform(scale=head.logit_scale, softcap=head.softcap, temperature=head.temperature)


def autocast_dtype(hidden: object) -> torch.dtype | None:
    """Return the dtype of autocast; None if autocast is off or does not change the tensor's
    dtype."""
    if not isinstance(hidden, Tensor) or hidden.dtype == torch.float64 or hidden.is_meta:
        return None
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_head(head: object, name: str = "head") -> None:
    """TypeError for anything but a `Head`."""
    if not isinstance(head, Head):
        of_model = " (of a language model: Head.of_model(model))" * hasattr(
            head, "get_output_embeddings"
        )
        raise TypeError(
            f"{name}: got {type(head).__name__}, want headloss.Head or Head.of(module){of_model}"
        )


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"a {value.dtype} tensor of shape {shape}"
    plain = value is None or isinstance(value, int | float | str)
    return f"{value!r}" if plain else type(value).__name__


def check_constant(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: got {describe(value)}, want a number; it is a constant")
    if not -LARGEST <= value <= LARGEST:  # Unlike math.isfinite, `<=` can be traced by a compiler.
        raise ValueError(f"{name}: got {value}, want a finite number")
    return value


def check_matrix(name: str, value: object, shape: str) -> None:
    if not isinstance(value, Tensor):
        hint = "; Head.of reads a module" if isinstance(value, nn.Module) else ""
        raise TypeError(f"{name}: got {describe(value)}, want a tensor {shape}{hint}")
    check_dense(name, value)
    # Quantised weights are integers, or subclasses of Tensor that report a floating dtype.
    plain = type(value) in (Tensor, nn.Parameter) or type(value).__module__.startswith("torch.")
    if not value.is_floating_point() or not plain:
        raise TypeError(
            f"{name}: got {value.dtype} in a {type(value).__module__}.{type(value).__name__}, want "
            "a plain floating tensor; a quantised head has to be dequantised first"
        )
    if value.element_size() < 2:
        raise TypeError(f"{name}: got {value.dtype}, want float16, bfloat16, float32 or float64")
    if value.dim() != 2 or value.shape[1] == 0:
        sharded = "; ZeRO-3 holds it: read the head inside deepspeed.zero.GatheredParameters"
        hint = sharded if hasattr(value, "ds_id") else ""
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {shape}{hint}")


def check_transform(temperature: object, softcap: object, logit_scale: object) -> None:
    """TypeError or ValueError for a bad temperature, soft cap or logit scale."""
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point() or temperature.element_size() < 2:
            raise TypeError(f"temperature: got {temperature.dtype}, want a floating tensor [..]")
        check_dense("temperature", temperature)
        if temperature.requires_grad:
            raise ValueError(
                "temperature: got a tensor that requires a gradient, want a constant; detach it"
            )
    elif check_constant("temperature", temperature) <= 0:
        raise ValueError(f"temperature: got {temperature}, want > 0")
    check_constant("logit_scale", logit_scale)
    if softcap is not None and not check_constant("softcap", softcap) > 0:
        raise ValueError(f"softcap: got {softcap}, want > 0, or None for no soft cap")


def check_one_per_token(temperature: float | Tensor, shape: torch.Size) -> None:
    """ValueError for a temperature that is neither a number nor a tensor with a value for each
    token."""
    if isinstance(temperature, Tensor) and temperature.shape not in ((), shape):
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, want a number or one value per "
            f"token, {tuple(shape)}"
        )


def _check_floating(name: str, value: object, want: str) -> None:
    # torch cannot multiply floats of 8 bits.
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1):
        raise TypeError(f"{name}: got {describe(value)}, want a floating tensor {want}")
    check_dense(name, value)


def _misfit(
    name: str, value: Tensor, want: str, other: Tensor, what: str = "a weight"
) -> ValueError:
    return ValueError(
        f"{name}: got shape {tuple(value.shape)}, want {want} for {what} of shape "
        f"{tuple(other.shape)}"
    )
