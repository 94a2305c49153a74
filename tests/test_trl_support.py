"""The ids that a sampler kept reach every forward pass of a trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
from test_rl import settings
from torch import Tensor
from trl_case import llama, load, prompts, reward, tokenizer

from headloss import rl
from headloss.batch.support_forms import padded_pairs
from headloss.integrations.trl.common import append_logged
from headloss.integrations.trl.support import counts_of, pairs, rows_given

TEMPERATURE = 0.9
CPU = torch.device("cpu")
SAMPLERS = {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.2}}


def make(kind: type = rl.GRPO, rollout_func: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        model=load(llama()),
        reward_funcs=reward,
        args=kind.config(**settings(**options)),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **({} if rollout_func is None else {"rollout_func": rollout_func}),
    )


def generated(trainer: Any) -> dict[str, Any]:
    """Return the trainer's inputs after one generation, before any training step."""
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def support_of(inputs: dict[str, Any]) -> Tensor:
    """Return the `support_ids` [B, C, K] in TRL's batch."""
    rows, shape = inputs["support_ids"], inputs["completion_ids"].shape
    ids, _ = pairs(rows, shape[1])
    padded = padded_pairs(ids, counts_of(rows, shape[1]).flatten())
    return padded.view(*shape, padded.shape[1])


def logits_of(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the sampler's logits [B, C, V] before filtering."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    columns = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        z = trainer.model(input_ids=ids, attention_mask=mask).logits
    return z[:, -columns - 1 : -1].float() / TEMPERATURE


def sampler_logps(trainer: Any, inputs: dict[str, Any], support: Tensor) -> Tensor:
    """Return the tokens' log-probs [B, C] over the kept ids."""
    z = logits_of(trainer, inputs)
    left = torch.full_like(z, -torch.inf)
    left.scatter_(2, support.clamp_min(0), z.gather(2, support.clamp_min(0)))
    empty = (support < 0).any(2) & (support != 0).all(2)
    # remove id 0 again, to which clamping has moved the padding id -1
    left[..., 0] = torch.where(empty, -torch.inf, left[..., 0])
    return left.log_softmax(2).gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)


def ratio(trainer: Any, inputs: dict[str, Any], old: Tensor) -> float:
    trainer._compute_loss(trainer.model, {**inputs, "old_per_token_logps": old})
    mode = "train" if trainer.model.training else "eval"
    append_logged(trainer)
    return trainer._metrics[mode]["headloss/grpo/ratio"][-1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ratio_is_one_on_the_first_step(sampler: str) -> None:
    trainer = make(sampling_support=True, **SAMPLERS[sampler])
    inputs = generated(trainer)
    support, scored = support_of(inputs), inputs["completion_mask"].bool()
    kept = (support >= 0).sum(2)[scored]
    assert (kept == 5).all() if sampler == "top_k" else len(kept.unique()) > 1
    hit = (support == inputs["completion_ids"].unsqueeze(2)).any(2)
    assert hit[scored].all()
    z = logits_of(trainer, inputs)
    best = z.topk(int(kept.max())).indices[scored]
    for own, likely in zip(support[scored], best, strict=True):
        own = own[own >= 0]
        assert set(own.tolist()) == set(likely[: len(own)].tolist())
    old = sampler_logps(trainer, inputs, support)
    assert ratio(trainer, inputs, old) == pytest.approx(1, abs=2e-6)
    del inputs["support_ids"]
    assert ratio(trainer, inputs, old) < 0.97


@pytest.mark.parametrize("kind", [rl.GRPO, rl.PPO, rl.REINFORCE])
def test_every_pass_has_the_support(kind: type) -> None:
    """Every forward pass uses the `support_ids`, also those for old and reference log-probs."""
    options: dict[str, Any] = {"num_iterations": 2} if kind is not rl.REINFORCE else {}
    trainer = make(kind, sampling_support=True, top_k=4, beta=0.1, **options)
    inputs = generated(trainer)
    scored = inputs["completion_mask"].bool()
    want = sampler_logps(trainer, inputs, support_of(inputs))[scored]
    passes = [name for name in ("old_per_token_logps", "ref_per_token_logps") if name in inputs]
    assert "ref_per_token_logps" in passes and (len(passes) == 2 or kind is rl.REINFORCE)
    for name in passes:
        torch.testing.assert_close(inputs[name][scored], want, rtol=1e-5, atol=1e-5)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2 and all(abs(loss) < 100 for loss in losses)


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return a rollout of two tokens per prompt: the first with the sampler's kept ids, the second
    sampled without a filter."""
    ids = [[10 + i, 20 + i] for i in range(len(prompts))]
    prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    support = [[[3, first, 50], None] for first, _ in ids]
    found = {"prompt_ids": prompt_ids, "completion_ids": ids, "support_ids": support}
    return {**found, "logprobs": [[-0.5, -0.7] for _ in ids]}


def test_a_rollout_says_what_was_kept() -> None:
    trainer = make(rollout_func=rollout, num_iterations=2, gradient_accumulation_steps=1)
    inputs = generated(trainer)
    first = inputs["completion_ids"][:, 0]
    want = torch.stack([torch.full_like(first, 3), first, torch.full_like(first, 50)], 1)
    assert torch.equal(support_of(inputs)[:, 0], want)
    assert (support_of(inputs)[:, 1] == -1).all()
    log_p = logits_of(trainer, inputs)
    z = log_p[:, 0].gather(1, want).log_softmax(1)[:, 1]
    whole = log_p[:, 1].log_softmax(1).gather(1, inputs["completion_ids"][:, 1:]).squeeze(1)
    torch.testing.assert_close(inputs["old_per_token_logps"], torch.stack([z, whole], 1))
    trainer.train()


def test_what_was_kept_may_be_an_array() -> None:
    """Kept ids may be arrays, per completion or for all completions."""
    kept = torch.tensor([[[3, 5], [7, -1]], [[2, -1], [4, 6]]])
    for given in (kept, kept.numpy(), [*kept.numpy()], kept.tolist()):
        rows = rows_given(given, [[8, 8], [9, 9]], CPU)
        assert [ids.tolist() for ids, _ in rows] == [[3, 5, 7], [2, 4, 6]]
        assert [counts.tolist() for _, counts in rows] == [[2, 1], [1, 2]]
    rows = rows_given([kept[0], None], [[8], [9, 9, 9]], CPU)
    assert [(ids.tolist(), counts.tolist()) for ids, counts in rows] == [
        ([3, 5], [2]),
        ([], [0, 0, 0]),
    ]


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[3, 5], [7, 2]]),  # one [tokens, K] tensor per completion is expected
        [[3, 5], [7]],
        [[[3.5]], [[7]]],
        [torch.tensor([[3.5]]), None],
        [3, 5],
    ],
)
def test_support_ids_of_another_type_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="support_ids: got .*, want (integers|ids)"):
        rows_given(given, [[8, 8], [9, 9]], CPU)


def test_unsupported_uses_of_sampling_support_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_func: is not supported .* support_ids"):
        make(rollout_func=rollout, sampling_support=True)
    with pytest.raises(ValueError, match="got 1 entries, want one for each of 2 completions"):
        rows_given([[[1]]], [[8], [9]], CPU)
    with pytest.raises(ValueError, match="support_ids: got them beside given logits"):
        make(sampling_support=True, top_k=3, use_fused_loss=False).train()
