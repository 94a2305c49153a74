"""What each of two ranks runs: verl's engine with data of its own or with a part of each sequence,
and its output processor under Megatron."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def differences(got: tuple[Any, Any], want: tuple[Any, Any]) -> dict[str, float]:
    """Of two batches of an engine: losses, metrics, all gradients, relative."""
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
    """Under FSDP2, data parallel or (`spread`) with Ulysses sequence parallelism; beside logits."""
    from verl_case import loss_of, step

    loss = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    theirs, ours = (loss_of(name, **loss) for name in (mode.removeprefix("headloss_"), mode))
    temperature = torch.tensor([0.7, 1.3, 0.9, 1.0])
    batch = functools.partial(step, temperature=temperature)
    return _beside(path, spread, theirs, ours, batch)


def teacher(path: str, spread: bool, alone: bool) -> dict[str, float]:
    """As `engine`, with a teacher's top k, `alone` or beside a policy loss."""
    from verl_case import distillation_of, taught

    loss = distillation_of(
        "vanilla", {"use_policy_gradient": False, "use_task_rewards": not alone}, entropy_coeff=0.1
    )
    batch = functools.partial(taught, distillation_only=alone, calculate_entropy=not alone)
    return _beside(path, spread, loss, loss, batch)


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
    for name in ("distillation/overlap_ratio", "distillation/overlap_token_advantage"):
        found[0][0]["metrics"].pop(name, None)  # they want the student's own top k
    return differences(found[1], found[0])


def megatron(spread: bool, tied: bool) -> dict[str, float]:
    """verl's own call of `GPTModel`, beside log-probs and entropies of Megatron's logits."""
    import megatron_ranks as ranks

    ranks.parallel(2)
    import verl_platform  # noqa: F401
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from verl.models.mcore import model_forward_fused as seam
    from verl.workers.engine.base import EngineRegistry

    import headloss.integrations.verl as adapter

    adapter.install()
    asked = SimpleNamespace(
        use_fused_kernels=True, fused_kernel_options={"impl_backend": "headloss"}
    )
    own = seam.fused_output_processor
    with contextlib.suppress(TypeError):  # the engine itself is not built: it wants a GPU
        EngineRegistry.new("language_model", "megatron", model_config=asked)
    assert seam.fused_output_processor is not own
    model = ranks.model_of(ranks.config_of(2, sequence_parallel=spread), tied)
    given = ranks.inputs(b=1)
    labels = given.pop("labels")
    slopes = torch.randn(2, ranks.S, generator=torch.Generator().manual_seed(3))
    logits = gather_from_tensor_model_parallel_region(model(**given))[0] / 0.8
    table = logits.log_softmax(-1)
    logp = table.gather(-1, labels[0, :, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1)

    def finished(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        (slopes[0] * pair[0] + slopes[1] * pair[1]).sum().backward()
        return [*(x.detach() for x in pair), *ranks.gradients(model)]

    want = finished((logp, entropy))
    out = model(
        **given, labels=labels, output_processor=seam.fused_output_processor,
        output_processor_context=seam.FusedOutputProcessorContext(temperature=0.8),
    )  # fmt: skip
    assert out.log_probs.shape == (ranks.S,)
    got = finished((out.log_probs, out.entropy))
    adapter.uninstall()
    assert seam.fused_output_processor is own
    return {"worst": ranks.worst(got, want)}
