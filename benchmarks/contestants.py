"""The implementations being timed: headloss through its public functions, plain PyTorch, and other
libraries.

T tokens, V vocabulary. `Contestant.make` prepares, for a benchmarked loss and a setting, a function
from `Inputs` to `Found`. `make` imports the library, so that the benchmark can report a missing
library and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from plain import plain_logits, restricted, with_the_rest
from torch import Tensor
from works import Z_WEIGHT, Inputs, Setting, Values, Work

import headloss as hl

MIB = 1 << 20
MEMORY: int | None = None  # Memory budget of headloss runs in bytes; None: headloss's default.
STATISTICS = ("logp", "lse", "entropy")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The values and gradients that one call of a benchmarked implementation returns.

    Attributes:
        values: results by name: "loss", "nll" (the mean of -logp), "logps" [T], "entropies" [T],
            and gradients "hidden", "weight", "bias", "lora_a", "lora_b".
        report: function that returns further values by name, which training does not need.
        accumulator: bytes of a float32 [V, H] accumulator of dW, in addition to the returned dW.
        factor: a number by which all returned gradients must still be multiplied.
        how: the schedule and chunk sizes of the call, if the implementation reports them.
    """

    values: dict[str, Tensor]
    accumulator: int = 0
    factor: float = 1.0
    how: str = ""
    report: Callable[[], dict[str, Tensor]] = dict

    def read(self) -> Found:
        """Return a copy of the result whose `values` also contain the values returned by
        `report()`."""
        return replace(self, values=self.values | self.report(), report=dict)


Run = Callable[[Inputs], Found]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An implementation of benchmarked losses.

    Attributes:
        make: function that prepares the computation of a benchmarked loss; ImportError or
            AttributeError if a package is not installed.
        works: names of the benchmarked losses that the implementation can compute; None: all.
        rounded: the implementation rounds logits to the inputs' dtype or drops small gradients, by
            design.
        gpu: the implementation needs a GPU.
    """

    name: str
    make: Callable[[Work, Setting], Run]
    works: frozenset[str] | None = None
    rounded: bool = False
    gpu: bool = False


def gradients(loss: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """Return the gradients of all inputs that require one."""
    wanted = inputs.leaves()
    if not wanted or not loss.requires_grad:
        return {}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


# ---------------------------------------------------------------------- headloss


def _options(**named: Any) -> hl.Options:
    return hl.Options(**{"memory_budget": MEMORY, **named})


def _headloss(**options) -> Callable[[Work, Setting], Run]:
    def make(work: Work, setting: Setting) -> Run:
        chosen = _options(**options)  # Options are made once, not in each call, as in a trainer.

        def run(inputs: Inputs) -> Found:
            batch, objective = work.batch(inputs), work.objective(inputs)
            out = hl.head_loss(inputs.hidden, inputs.head(), batch, objective, chosen)
            return _found(out, inputs)

        return run

    return make


def _in_place(metrics: bool = False, **options) -> Callable[[Work, Setting], Run]:
    def make(work: Work, setting: Setting) -> Run:
        chosen = _options(metrics=metrics, **options)

        def run(inputs: Inputs) -> Found:
            assert inputs.logits is not None
            batch, objective = work.batch(inputs), work.objective(inputs)
            out = hl.logits_loss(inputs.logits, batch, objective, inplace=True, options=chosen)
            return _found(out, inputs)

        return run

    return make


def _captured(make: Callable[[Work, Setting], Run]) -> Callable[[Work, Setting], Run]:
    """Wrap an implementation with static shapes: capture forward and backward in a CUDA graph, once
    per set of inputs."""

    def of_graphs(work: Work, setting: Setting) -> Run:
        run = make(work, setting)
        graphs: dict[int, tuple[torch.cuda.CUDAGraph, Found]] = {}

        def replay(inputs: Inputs) -> Found:
            key = inputs.targets.data_ptr()
            if key not in graphs:
                graphs[key] = captured(lambda: run(inputs).read())
                inputs.fresh()
            graph, found = graphs[key]
            graph.replay()
            return found

        return replay

    return of_graphs


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return the CUDA graph of a run, and the outputs that a replay overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def _found(out: hl.Output, inputs: Inputs) -> Found:
    def report() -> dict[str, Tensor]:
        values = {"logps": out.logps, "entropies": out.entropies}
        return {name: value for name, value in values.items() if value is not None}

    plan, loss = out.plan, {"loss": out.loss.detach()}
    size = plan.tile.rows if plan.schedule in ("recompute", "statistics") else plan.chunk_tokens
    found = Found(
        values=loss | gradients(out.loss, inputs),
        accumulator=plan.bytes.get("weight gradient accumulator", 0),
        how=f"{plan.schedule} of {size} tokens, {plan.backend}",
        report=report,
    )
    # A call without gradients is made for its log-probs, so reading the log-probs is part of the
    # timed call.
    return found if inputs.leaves() else found.read()


def _head_stats(work: Work, setting: Setting) -> Run:
    def run(inputs: Inputs) -> Found:
        stats = hl.head_stats(inputs.hidden, inputs.head(), inputs.targets, _options())
        return Found(values={"logps": stats.logp, "entropies": stats.entropy})

    return run


def _stats_elsewhere(schedule: str, gradients: tuple[str, ...] = STATISTICS) -> Any:
    """Make a run that computes log-probs by `head_stats` and the loss in plain PyTorch, like a
    trainer with its own loss."""

    def make(work: Work, setting: Setting) -> Run:
        def values(inputs: Inputs) -> Values:
            head, options = inputs.head(), _options(schedule=schedule)
            found = hl.head_stats(inputs.hidden, head, inputs.targets, options, gradients)
            return Values(found.logp, found.lse, found.entropy)

        return _by_values(values, work)

    return make


def _function(separable: str | None) -> Callable[[Work, Setting], Run]:
    """Make a run of `head_function` with the loss in plain PyTorch."""

    def make(work: Work, setting: Setting) -> Run:
        def run(inputs: Inputs) -> Found:
            def loss_of(logps: Tensor, entropies: Tensor) -> Tensor:
                return work.loss(Values(logps, entropy=entropies), inputs)

            given = (inputs.hidden, inputs.head(), work.batch(inputs), loss_of, separable)
            loss = hl.head_function(*given, options=_options())  # type: ignore[arg-type]
            return Found(values={"loss": loss.detach()} | gradients(loss, inputs))

        return run

    return make


# ---------------------------------------------------------------------- losses from log-probs


def _by_values(
    values_of: Callable[[Inputs], Values], work: Work, float32_sums: bool = False
) -> Run:
    """Make a run from per-token values of a library, with the loss on top in plain PyTorch."""

    def run(inputs: Inputs) -> Found:
        values = values_of(inputs)
        loss = work.loss(values, inputs)
        found = {"loss": loss.detach(), "logps": values.logp.detach()}
        if values.entropy is not None:
            found["entropies"] = values.entropy.detach()
        return _sums(found | gradients(loss, inputs), float32_sums)

    return run


def _by_loss(loss_of: Callable[[Inputs], Tensor], float32_sums: bool = False) -> Run:
    """Return a run that calls `loss_of`, a library's mean cross-entropy, and returns the loss and
    its gradients."""

    def run(inputs: Inputs) -> Found:
        loss = loss_of(inputs)
        return _sums({"nll": loss.detach()} | gradients(loss, inputs), float32_sums)

    return run


def _sums(values: dict[str, Tensor], float32_sums: bool) -> Found:
    weight = values.get("weight")
    separate = float32_sums and weight is not None and weight.dtype != torch.float32
    return Found(values=values, accumulator=4 * weight.numel() if separate else 0)


# ---------------------------------------------------------------------- plain PyTorch


def _values_of_logits(work: Work) -> Callable[..., Values]:
    """Compute the log-probs, entropies and divergences that a benchmarked loss reads, from float32
    logits in plain PyTorch."""

    def values(
        z: Tensor,
        targets: Tensor,
        teacher: Tensor | None = None,
        candidates: Tensor | None = None,
        support: Tensor | None = None,
    ) -> Values:
        z = z if support is None else restricted(z, support)
        log_p = z.log_softmax(-1)
        entropy = divergence = None
        chosen = None if candidates is None else with_the_rest(log_p, candidates)
        if "entropy" in work.reads:
            entropy = -(log_p.exp() * log_p).sum(-1)
        if teacher is not None:
            log_q = teacher.log_softmax(-1)
            divergence = (log_q.exp() * (log_q - log_p)).sum(-1)
        lse = z.logsumexp(-1) if "lse" in work.reads else None
        logp = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        return Values(logp, lse, entropy, divergence, chosen)

    return values


def _eager(work: Work, setting: Setting, compiled: bool = False) -> Run:
    values_of_logits = _values_of_logits(work)

    def of_products(x, head, y, teacher_x, teacher_w, candidates, support):
        teacher = None if teacher_x is None else F.linear(teacher_x, teacher_w).float()
        return values_of_logits(plain_logits(x, *head).float(), y, teacher, candidates, support)

    def cross_entropy(x, head, y):
        return F.cross_entropy(plain_logits(x, *head).float(), y)

    def of_given(z, y):
        return F.cross_entropy(z.float(), y)

    if compiled:
        # With dynamic=None, torch.compile compiles the first number of tokens as a constant, and
        # compiles with dynamic shapes when the number changes.
        dynamic = None if setting.changing else False
        of_products, cross_entropy, of_given = (
            torch.compile(f, dynamic=dynamic) for f in (of_products, cross_entropy, of_given)
        )
    if setting.given:
        return _by_loss(lambda i: of_given(i.logits, i.targets))
    if work.name == "ce":
        return _by_loss(lambda i: cross_entropy(i.hidden, i.parts, i.targets))

    def of_inputs(i: Inputs) -> Values:
        teacher = (i.teacher_hidden, i.teacher_weight)
        return of_products(i.hidden, i.parts, i.targets, *teacher, i.candidates, i.support)

    return _by_values(of_inputs, work)


def _torch_chunked(tokens: int | None = None) -> Callable[[Work, Setting], Run]:
    """Make runs of `F.linear_cross_entropy`, in chunks of the default size or of `tokens`."""

    def make(work: Work, setting: Setting) -> Run:
        chunked = F.linear_cross_entropy
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=tokens)
        return _by_loss(lambda i: chunked(i.hidden, i.weight, i.targets, options=options))

    return make


# ---------------------------------------------------------------------- peers


def _trl(work: Work, setting: Setting) -> Run:
    import trl.trainer.utils  # noqa: F401  # its backward needs this
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    outputs = ("entropy",) if "entropy" in work.reads else ()

    def values(i: Inputs) -> Values:
        logps, entropy, *_ = ChunkedLogProbFunction.apply(
            i.hidden, i.weight, None, i.targets, 1.0, 8192, None, 1.0, outputs
        )
        return Values(logps, entropy=entropy)

    return _by_values(values, work, float32_sums=True)


def _liger_scaled(work: Work, setting: Setting) -> Run:
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    entropy = "entropy" in work.reads
    apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply
    arguments = (1.0, -100, 1, entropy)
    # Raises an error if Liger's Hopper kernel is missing.
    module._resolve_implementation(torch.device("cuda"))

    def values(i: Inputs) -> Values:
        found = apply(i.hidden, i.weight, i.targets, *arguments)
        return Values(-found[0], entropy=found[1].float()) if entropy else Values(-found)

    return _by_values(values, work)


def _liger_grpo(work: Work, setting: Setting, **level: Any) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    length = setting.segments
    if not isinstance(length, int) or setting.tokens % length:
        raise ValueError("takes sequences of one length only")
    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=True, use_ref_model=False, chunk_size=1, loss_type="grpo", **level
    )

    def run(i: Inputs) -> Found:
        shape = (-1, length)
        x, y = i.hidden.view(*shape, i.hidden.shape[1]), i.targets.view(shape)
        mask = torch.ones_like(y)
        old = i.old.view(shape)
        found = loss_of(x, i.weight, y, mask, i.advantages, old_per_token_logps=old)[0]
        return Found(values={"loss": found.detach()} | gradients(found, i))

    return run


def _liger_flce(accumulate: torch.dtype | None) -> Callable[[Work, Setting], Run]:
    def make(work: Work, setting: Setting) -> Run:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def loss(i: Inputs) -> Tensor:
            found = liger_fused_linear_cross_entropy(
                i.hidden, i.weight, i.targets, accum_dtype=accumulate
            )
            return found[0] if isinstance(found, tuple) else found

        return _by_loss(loss, float32_sums=accumulate == torch.float32)

    return make


def _liger_flce_hopper(work: Work, setting: Setting) -> Run:
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as module

    apply = module.LigerFusedLinearCrossEntropySM90Function.apply
    return _by_loss(lambda i: apply(i.hidden, i.weight, i.targets))


def _liger_jsd(work: Work, setting: Setting) -> Run:
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss_of = LigerFusedLinearJSD(jsd_beta=0.0)  # KL(teacher || student)

    def run(i: Inputs) -> Found:
        found = loss_of(i.hidden, i.weight, i.teacher_hidden, i.teacher_weight, None)
        return Found(values={"loss": found.detach()} | gradients(found, i))

    return run


def _liger_ce(work: Work, setting: Setting) -> Run:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def loss(i: Inputs) -> Tensor:
        found = liger_cross_entropy(i.logits, i.targets)
        return found[0] if isinstance(found, tuple) else found

    return _by_loss(loss)


def _cce(work: Work, setting: Setting) -> Run:
    from cut_cross_entropy import linear_cross_entropy

    if setting.trains:
        return _by_loss(lambda i: linear_cross_entropy(i.hidden, i.weight, i.targets))

    def scores(i: Inputs) -> Found:
        nll = linear_cross_entropy(i.hidden, i.weight, i.targets, reduction="none")
        return Found(values={"logps": -nll}, how="log-probs alone")

    return scores


def _quack(scaled: bool | None) -> Callable[[Work, Setting], Run]:
    def make(work: Work, setting: Setting) -> Run:
        if setting.given:
            return _quack_given()
        _quack_without_semantic_keys()
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        # QuACK's option `use_scaled_exp` fails if a chunk has as many tokens as the hidden width.
        chunk = 4096 if setting.width != 4096 else 8192
        run = _by_loss(
            lambda i: chunked_linear_cross_entropy(
                i.hidden, i.weight, i.targets, chunk, use_scaled_exp=scaled, tuned=False
            ),
            float32_sums=True,
        )
        if setting.trains:
            return run
        return lambda i: Found(values=run(i).values, how="mean loss alone")

    return make


def _quack_without_semantic_keys() -> None:
    """Patch the function that makes QuACK's kernel-cache keys: where it raises TypeError for a
    value of an unknown type, the key becomes the name of the type."""
    from quack.gemm_runtime import identity

    inner = identity.semantic_value_key
    if getattr(inner, "opaque", False):
        return

    def key(value: Any, *rest: Any) -> Any:
        try:
            return inner(value, *rest)
        except TypeError:
            return ("opaque", type(value).__qualname__)

    key.opaque = True  # type: ignore[attr-defined]
    identity.semantic_value_key = key


def _quack_given() -> Run:
    from quack.cross_entropy import cross_entropy_fwd_out

    def run(i: Inputs) -> Found:
        z = i.logits.detach()  # type: ignore[union-attr]
        loss = torch.empty(len(z), device=z.device)
        cross_entropy_fwd_out(z, i.targets, None, loss=loss, lse=None, dx=z, weight=None)
        return Found(values={"logps": -loss, "hidden": z}, factor=1 / len(z))

    return run


def _fast_llm(work: Work, setting: Setting) -> Run:
    """Make a run of Fast-LLM's monolithic Triton loss, with a separate gradient tensor."""
    from fast_llm.functional.triton.monolithic_loss import triton_monolithic_loss_forward_backward

    if not setting.given:
        raise ValueError("takes logits that are there")

    def run(i: Inputs) -> Found:
        slots: dict[str, Any] = {"ce": (1.0,)}
        if work.name != "ce":
            policy = (i.advantages[i.ids], i.old, 1.0, 0.2, 0.2, i.lengths[i.ids])
            slots |= {"z": (None, Z_WEIGHT), "grpo": policy, "compute_metrics": True}
        z = i.logits.detach()  # type: ignore[union-attr]
        found = triton_monolithic_loss_forward_backward(
            z, i.targets, None, 1.0, None, float(len(z)), **slots
        )
        loss = found[0] if work.name == "ce" else found[0] + Z_WEIGHT * found[1] + found[2]
        return Found(values={"loss": loss, "hidden": found[4]})

    return run


def _fast_llm_compiled(work: Work, setting: Setting) -> Run:
    """Make a run of Fast-LLM's loss without Triton: one function under torch.compile."""
    from fast_llm.layers.language_model.loss.entropy_loss import LanguageModelLabelEntropyLoss
    from fast_llm.layers.language_model.loss.monolithic import _monolithic_core
    from fast_llm.layers.language_model.loss.policy_gradient import LanguageModelGRPOLoss
    from fast_llm.layers.language_model.loss.z_loss import LanguageModelZLoss

    if not setting.given:
        raise ValueError("takes logits that are there")
    several = (LanguageModelLabelEntropyLoss, LanguageModelZLoss, LanguageModelGRPOLoss)
    children = several[:1] if work.name == "ce" else several

    def run(i: Inputs) -> Found:
        z = i.logits.detach()  # type: ignore[union-attr]
        tokens = float(len(z))
        policy = (i.advantages[i.ids], i.old, 1.0, tokens, 0.2, 0.2, i.lengths[i.ids], True)
        given = ((i.targets, 1.0, tokens), (None, Z_WEIGHT, tokens), (i.targets, *policy))
        given = given[: len(children)]
        parts, gradient = _monolithic_core(children, z, None, 1.0, None, given)
        losses = [loss for loss, _ in parts]
        loss = sum(w * x for w, x in zip((1.0, Z_WEIGHT, 1.0), losses, strict=False))
        return Found(values={"loss": loss, "hidden": gradient})

    return run


# ---------------------------------------------------------------------- the registry

CE_ONLY = frozenset({"ce"})
SCORE_WORKS = frozenset({"ce", "grpo", "gspo", "scores"})
NLL_WORKS = frozenset({"ce", "scores"})


def _registry() -> dict[str, Contestant]:
    found = {}

    def add(name: str, make: Callable[[Work, Setting], Run], **more) -> None:
        found[name] = Contestant(name=name, make=make, **more)

    add("headloss", _headloss())
    add("headloss, no metrics", _headloss(metrics=False))
    for budget, size in (("1200 MiB", 1200), ("2200 MiB", 2200), ("5 GiB", 5120)):
        add(f"headloss, {budget}", _headloss(schedule="one_pass", memory_budget=size * MIB))
    add("headloss, 128 MiB", _headloss(memory_budget=128 * MIB))
    add("headloss, recompute", _headloss(schedule="recompute"))
    add("headloss, frozen", _headloss(schedule="frozen"))
    add("head_stats", _head_stats)
    add("head_stats, held", _stats_elsewhere("held"))
    add("head_stats, recompute", _stats_elsewhere("recompute"))
    add("head_stats, frozen", _stats_elsewhere("frozen", ("logp",)))
    for share in (0.001, 0.004):
        name = f"headloss, tolerance {share:g}"
        add(name, _headloss(gradient_tolerance=share), rounded=True)
    for separable in (None, "token", "sequence"):
        add(f"head_function, {separable or 'undeclared'}", _function(separable))
    add("headloss in place", _in_place())
    add("headloss in place, declared upstream", _in_place(upstream=1.0))
    add("headloss in place, captured", _captured(_in_place(static=True)), gpu=True)
    add("headloss in place, metrics", _in_place(metrics=True))
    add("headloss, captured", _captured(_headloss(static=True)), gpu=True)
    add("eager", _eager, rounded=True)
    add("torch.compile", partial(_eager, compiled=True), rounded=True, gpu=True)
    add("F.linear_cross_entropy", _torch_chunked(), works=CE_ONLY, rounded=True)
    for size in (2048, 4096, 8192):
        name = f"F.linear_cross_entropy, chunks of {size}"
        add(name, _torch_chunked(size), works=CE_ONLY, rounded=True)
    add("TRL", _trl, works=SCORE_WORKS, rounded=True)
    add("Liger GRPO", _liger_grpo, works=frozenset({"grpo"}), rounded=True, gpu=True)
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    add(
        "Liger GSPO",
        partial(_liger_grpo, **sequence),
        works=frozenset({"gspo"}),
        rounded=True,
        gpu=True,
    )
    add("Liger scaled CE", _liger_scaled, works=SCORE_WORKS, rounded=True, gpu=True)
    add("Liger JSD", _liger_jsd, works=frozenset({"distillation"}), rounded=True, gpu=True)
    more = {"works": CE_ONLY, "rounded": True, "gpu": True}
    add("Liger FLCE", _liger_flce(None), **more)
    add("Liger FLCE, fp32 sums", _liger_flce(torch.float32), **more)
    add("Liger FLCE, Hopper", _liger_flce_hopper, **more)
    add("Liger CE", _liger_ce, **more)
    given = {"works": frozenset({"ce", "ce+z+grpo"}), "rounded": True, "gpu": True}
    add("Fast-LLM, Triton", _fast_llm, **given)
    add("Fast-LLM, compiled", _fast_llm_compiled, **given)
    add("CCE", _cce, works=NLL_WORKS, rounded=True, gpu=True)
    add("QuACK", _quack(None), works=NLL_WORKS, rounded=True, gpu=True)
    add("QuACK, no scaled exp", _quack(False), works=NLL_WORKS, rounded=True, gpu=True)
    return found


CONTESTANTS: dict[str, Contestant] = _registry()
