"""Comparison of verl's engine and Megatron output processor with and without headloss, on two
ranks.

Either each rank has different sequences (data parallelism), or each rank has a part of every
sequence (sequence or tensor parallelism).
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch


def differences(got: tuple[Any, Any], want: tuple[Any, Any]) -> dict[str, float]:
    """Return the relative differences of two engine results in losses, metrics and gradients."""
    (mine, my_gradients), (theirs, their_gradients) = got, want
    found = {"loss": _off(mine["loss"], theirs["loss"])}
    for name, value in theirs["metrics"].items():
        pair = (getattr(x, "values", x) for x in (mine["metrics"][name], value))
        found[name] = _off(*pair)
    a, b = (torch.cat([x.flatten() for x in g.values()]) for g in (my_gradients, their_gradients))
    assert b.norm() > 0
    return {**found, "gradients": float((a - b).norm() / b.norm())}


def _off(got: Any, want: Any) -> float:
    a, b = torch.tensor(got).double(), torch.tensor(want).double()
    return float((a - b).norm() / (b.norm() + 0.1))


def engine(path: str, mode: str, spread: bool, tied: bool) -> dict[str, float]:
    """Compare with logits under FSDP2, with data parallelism or, if `spread`, with Ulysses sequence
    parallelism."""
    from verl_case import loss_of, step

    loss = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    theirs, ours = (loss_of(name, **loss) for name in (mode.removeprefix("headloss_"), mode))
    temperature = torch.tensor([0.7, 1.3, 0.9, 1.0])
    batch = functools.partial(step, temperature=temperature)
    return _beside(path, spread, theirs, ours, batch)


def teacher(path: str, spread: bool, alone: bool) -> dict[str, float]:
    """Compare a step of verl's engine on two ranks with and without headloss, with a top-k
    teacher's loss alone or in addition to a policy loss."""
    from verl_case import distillation_of, taught

    loss = distillation_of(
        "vanilla", {"use_policy_gradient": False, "use_task_rewards": not alone}, entropy_coeff=0.1
    )
    batch = functools.partial(taught, distillation_only=alone, calculate_entropy=not alone)
    return _beside(path, spread, loss, loss, batch)


def whole(path: str, spread: bool, ceiling: float | None) -> dict[str, float]:
    """Compare full-vocabulary distillation from hidden states with verl's top k of all V tokens."""
    from verl_case import V, distillation_of, taught_whole, teacher_weight

    import headloss as hl
    import headloss.integrations.verl as adapter

    adapter.register_teacher(lambda device: hl.Head(teacher_weight().to(device)))
    settings = {"use_policy_gradient": False, "use_task_rewards": True, "topk": V}
    settings |= {"log_prob_min_clamp": None, "loss_max_clamp": ceiling}
    names = "forward_kl_topk", "headloss_forward_kl"
    losses = [distillation_of("vanilla", settings, name, entropy_coeff=0.1) for name in names]
    return _beside(path, spread, *losses, taught_whole)


def _beside(path: str, spread: bool, theirs: Any, ours: Any, batch: Any) -> dict[str, float]:
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group
    from verl_case import engine_of, trained

    import headloss.integrations.verl as adapter

    adapter.install()
    more = {"ulysses_sequence_parallel_size": 2} if spread else {}
    found = []
    for backend, loss in ((None, theirs), ("headloss", ours)):
        made = engine_of(path, backend, engine=more)
        set_ulysses_sequence_parallel_group(made.ulysses_parallel_group)
        data = batch(
            seed=0 if spread else torch.distributed.get_rank(), use_fused_kernels=bool(backend),
            global_batch_size=4 if spread else 8,
        )  # fmt: skip
        found.append(trained(made, data, loss))
    set_ulysses_sequence_parallel_group(None)
    # skip verl's metrics of the teacher's and student's top k, which headloss does not compute
    for name in list(found[0][0]["metrics"]):
        if "overlap" in name or ("mass" in name and name not in found[1][0]["metrics"]):
            del found[0][0]["metrics"][name]
    return differences(found[1], found[0])


def megatron(
    spread: bool, tied: bool, layout: str, topk: bool = False, floor: float | None = None
) -> dict[str, float]:
    """Compare verl's Megatron forward, packed (thd) or in rows (bshd), with verl's and headloss's
    logits processor, in outputs and gradients."""
    import megatron_ranks as ranks

    ranks.parallel(2)
    import verl_platform  # noqa: F401
    from verl.models.mcore import model_forward
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine
    from verl_case import distillation_of, jagged

    import headloss.integrations.verl as adapter

    adapter.install()
    own = Engine._lm_head_logits_processor
    asked = SimpleNamespace(
        use_fused_kernels=True, fused_kernel_options={"impl_backend": "headloss"}
    )
    with contextlib.suppress(TypeError):  # building the engine would need a GPU
        EngineRegistry.new("language_model", "megatron", model_config=asked)
    assert Engine._lm_head_logits_processor is not own
    model = ranks.model_of(
        ranks.config_of(2, sequence_parallel=spread), tied, attention=False, length=16
    )
    model.embedding.add_position_embedding = False  # verl passes no positions of packed tokens
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(ranks.V, (n,), generator=generator) for n in (5, 2, 7)]
    batch = {}
    if topk:
        table = [4 * torch.randn(len(x), ranks.V, generator=generator) for x in ids]
        likeliest = [x.log_softmax(-1).topk(6) for x in table]
        batch["teacher_logprobs"] = jagged([x.values for x in likeliest])
        batch["teacher_ids"] = jagged([x.indices for x in likeliest])
    loss = distillation_of("vanilla", {"log_prob_min_clamp": floor})
    object.__setattr__(loss.keywords["config"], "strategy", "megatron")
    found = []
    for ours in (False, True):
        engine: Any = object.__new__(Engine)
        engine.is_value_model, engine.model_config = False, asked
        engine.engine_config = SimpleNamespace(
            use_fused_kernels=ours, entropy_from_logits_with_chunking=False
        )
        engine.module = [model]
        if ours:
            engine._maybe_enable_fused_kernels()
            assert not engine.engine_config.use_fused_kernels
        heats = [torch.full((len(x),), 0.7 + 0.2 * n) for n, x in enumerate(ids)]
        output = model_forward.gptmodel_forward_model_engine(
            model, jagged(ids), {}, data_format=layout,
            logits_processor=functools.partial(
                engine._lm_head_logits_processor, calculate_sum_pi_squared=False,
                calculate_entropy=True, distillation_use_topk=topk, distillation_only=False,
                logits_processor_func=loss, batch=batch, data_format=layout,
            ),
            logits_processor_args={"label": jagged(ids), "temperature": jagged(heats)},
        )  # fmt: skip
        names = sorted(name for name in output if not name.startswith("overlap"))
        values = {name: output[name].values() for name in names}
        slopes = torch.Generator().manual_seed(3)
        carry = [x for x in values.values() if x.requires_grad]
        sum((torch.randn(x.shape, generator=slopes) * x).sum() for x in carry).backward()
        found.append(([x.detach() for x in values.values()], ranks.gradients(model), values.keys()))
    adapter.uninstall()
    assert Engine._lm_head_logits_processor is own and found[0][2] == found[1][2]
    (want, grads, _), (got, our_grads, _) = found
    values = max(ranks.off(a, b) for a, b in zip(got, want, strict=True))
    return {"values": values, "gradient": max(map(ranks.off, our_grads, grads))}
