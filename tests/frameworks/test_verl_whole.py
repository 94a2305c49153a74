"""Full-vocabulary distillation from a teacher's hidden states in verl's FSDP engine agrees with
logits.

The expected values come from verl's top-k loss with k = V.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="`make test-frameworks` compares with verl")
import verl.trainer.distillation.fsdp.losses as of_logits
from test_verl_adapter import same
from test_verl_teacher import WAYS, engines, old_log_probs  # noqa: F401
from verl.utils import tensordict_utils as tu
from verl_case import (
    PROMPTS,
    V,
    alone,  # noqa: F401
    distillation_of,
    installed,  # noqa: F401
    taught_whole,
    teacher_weight,
    trained,
)

import headloss as hl
import headloss.integrations.verl as adapter
from headloss.integrations.verl import whole


@pytest.fixture(autouse=True)
def head() -> Any:
    adapter.register_teacher(lambda device: hl.Head(teacher_weight().to(device)))
    yield
    whole.FACTORIES.clear()


def both(engines: Any, kind: str, settings: Any, flags: Any = None, **more: Any) -> list[Any]:  # noqa: F811
    results, engine = [], {name: more.pop(name) for name in ("tied", "packed") if name in more}
    old = old_log_probs(engines(None, **engine))
    settings = {"topk": V, "log_prob_min_clamp": None, **settings}
    for backend, mode in ((None, "forward_kl_topk"), ("headloss", f"headloss_{kind}")):
        data = taught_whole(use_fused_kernels=bool(backend), **(flags or {}))
        tu.assign_non_tensor(data, use_remove_padding=engine.get("packed", True))
        data["old_log_probs"] = old
        loss = distillation_of("vanilla", settings, mode, **more)
        results.append(trained(engines(backend, **engine), data, loss))
    (theirs, _), (ours, _) = results
    for name in list(theirs["metrics"]):
        # verl logs metrics of probability mass and token overlap only for top-k teachers
        if "mass" in name or "overlap" in name:
            del theirs["metrics"][name]
            assert name not in ours["metrics"]
    assert {"distillation/loss", "distillation/loss_max"} <= ours["metrics"].keys()
    return results


def reverse(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    return (log_q.exp() * (log_q - log_p)).sum(-1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_ways(
    engines: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    way: str,
    packed: bool,
) -> None:
    """In all of verl's distillation modes, headloss and verl's engine agree on two micro-batches,
    with an entropy bonus and a KL penalty in the policy loss."""
    if kind == "reverse_kl":
        monkeypatch.setattr(of_logits, "kl_divergence", reverse)
    only = way == "supervised alone"
    flags = {"distillation_only": only, "calculate_entropy": not only}
    policy = {"entropy_coeff": 0.1, "use_kl_loss": True}
    settings = {**WAYS[way], "loss_max_clamp": 100.0}
    want, got = both(engines, kind, settings, flags, packed=packed, tied=packed, **policy)
    same(got, want)


@pytest.mark.parametrize("ceiling", [None, 10.0, 2.0])
@pytest.mark.parametrize(
    "over", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_ceilings(engines: Any, ceiling: float | None, over: str) -> None:  # noqa: F811
    """An upper bound of a token's distillation loss agrees with verl's, and tokens above the bound
    get no gradient."""
    settings = {**WAYS["supervised beside rewards"], "loss_max_clamp": ceiling}
    want, got = both(engines, "forward_kl", settings, loss_agg_mode=over)
    same(got, want)
    assert got[0]["metrics"]["distillation/loss_max"].aggregate() > 2.0


def test_a_list_of_hidden_states(engines: Any) -> None:  # noqa: F811
    """A teacher's hidden states may be a list of tensors, as in an agent loop's `extra_fields`."""
    settings = {**WAYS["supervised alone"], "log_prob_min_clamp": None}
    loss, results = distillation_of("vanilla", settings, "headloss_reverse_kl"), []
    for nested in (True, False):
        data = taught_whole()
        if not nested:
            rows = list(data["teacher_hidden"].unbind())
            del data["teacher_hidden"]
            tu.assign_non_tensor_stack(data, "teacher_hidden", rows)
        results.append(trained(engines("headloss"), data, loss))
    same(*results)


def test_refused(engines: Any) -> None:  # noqa: F811
    """Full-vocabulary distillation without hidden states, a teacher's head, or supported settings
    raises an error that names the missing or unsupported part."""
    settings = {**WAYS["supervised beside rewards"], "topk": V}
    with pytest.raises(ValueError, match=r"log_prob_min_clamp: got -10.0 with headloss_js"):
        distillation_of("vanilla", settings, "headloss_js")
    with pytest.raises(ValueError, match="Unsupported loss mode: headloss_l2"):
        distillation_of("vanilla", settings, "headloss_l2")
    settings["log_prob_min_clamp"] = None
    loss, engine = distillation_of("vanilla", settings, "headloss_js"), engines("headloss")
    data = taught_whole()
    del data["teacher_hidden"]
    with pytest.raises(ValueError, match="teacher_hidden: is not in the batch, .* log-probs alone"):
        trained(engine, data, loss)
    data = taught_whole()
    data["temperature"] = torch.full((len(PROMPTS),), 0.8)
    with pytest.raises(ValueError, match="temperature: got one per sample with headloss_js"):
        trained(engine, data, loss)
    with pytest.raises(RuntimeError, match="loss_mode: headloss_js is computed with the log-probs"):
        trained(engines(None), taught_whole(use_fused_kernels=False), loss)
    whole.FACTORIES.clear()
    with pytest.raises(ValueError, match="headloss_js without a teacher's head, want register_tea"):
        trained(engine, taught_whole(), loss)
