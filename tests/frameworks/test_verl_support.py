"""The kept ids of a sampler reach verl's FSDP engine through verl's batch, for verl's losses and
for headloss's.

Log-probs and losses are compared with those of logits masked to the kept ids.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="`make test-frameworks` compares with verl")
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl_case import (
    PROMPTS,
    RESPONSES,
    B,
    V,
    alone,  # noqa: F401
    engine_of,
    installed,  # noqa: F401
    loss_of,
    saved,
    step,
    trained,
)

Sets = list[list[list[int]] | None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("llama"))


def with_sets(data: TensorDict, **flags: Any) -> Sets:
    """Add `support_ids` to the batch: one to nine ids per token, always with the sampled token, and
    an empty list for one token."""
    generator = torch.Generator().manual_seed(5)
    sets: Sets = []
    for response in data["responses"].unbind():
        lists = []
        for token in response.tolist():
            ids = torch.randperm(V, generator=generator)[: int(token) % 9 + 1].tolist()
            lists.append(sorted({*ids, token}))
        sets.append(lists)
    sets[0][1] = []  # type: ignore[index]
    sets[0][2] = None  # type: ignore[index]  # an unscored token
    sets[-1] = None  # an unscored row
    tu.assign_non_tensor_stack(data, "support_ids", sets)
    tu.assign_non_tensor(data, **flags)
    return sets


def masked(model: Any, data: TensorDict, sets: Sets) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each sequence's response log-probs, entropies, and mask of scored tokens."""
    measured = []
    rows = zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)
    for b, (ids, mask) in enumerate(rows):
        z = model(input_ids=ids.unsqueeze(0)).logits[0, PROMPTS[b] - 1 : -1] / 0.8
        inside = torch.zeros_like(z).bool()
        for c, row in enumerate(sets[b] or [[]] * RESPONSES[b]):
            inside[c, row or slice(None)] = True
        log_p = z.masked_fill(~inside, -1e4).log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        logp = log_p.gather(1, ids[PROMPTS[b] :].unsqueeze(1)).squeeze(1)
        measured.append((logp, entropy, mask.bool()))
    return measured


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", ["vanilla", "headloss_vanilla"])
def test_log_probs_are_over_the_sets(path: str, packed: bool, mode: str) -> None:
    """Log-probs and entropies are normalised over each token's `support_ids`, both under verl's
    loss functions and under headloss's."""
    engine, data = engine_of(path, "headloss", packed=packed), step()
    sets = with_sets(data, use_remove_padding=packed)
    plain = engine_of(path, None).module
    with torch.no_grad():
        want = masked(plain, data, sets)
    output = trained(engine, data, loss_of(mode))[0]["model_output"]
    for name, at in (("log_probs", 0), ("entropy", 1)):
        for b, got in enumerate(output[name].unbind()):
            response = got[PROMPTS[b] - 1 : PROMPTS[b] + RESPONSES[b] - 1]
            scored = want[b][2]
            torch.testing.assert_close(response[scored], want[b][at][scored], rtol=1e-4, atol=1e-5)


def test_both_ways_train_alike(path: str) -> None:
    """With `support_ids`, verl's loss and headloss's loss give the same gradients, which differ
    from the gradients without `support_ids`."""
    found = []
    for mode, sets in (("vanilla", True), ("headloss_vanilla", True), ("vanilla", False)):
        engine, data = engine_of(path, "headloss"), step()
        if sets:
            with_sets(data)
        found.append(trained(engine, data, loss_of(mode, entropy_coeff=0.1)))
    flat = [torch.cat([g.flatten() for g in gradients.values()]) for _, gradients in found]
    assert (flat[0] - flat[1]).norm() < 2e-5 * flat[0].norm()
    assert (flat[0] - flat[2]).norm() > 0.1 * flat[0].norm()
    torch.testing.assert_close(
        torch.tensor(found[0][0]["loss"]), torch.tensor(found[1][0]["loss"]), rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["vanilla", "headloss_vanilla"])
@pytest.mark.parametrize("way", ["a row", "a token", "the end"])
def test_a_missing_set_names_its_sequence(path: str, mode: str, way: str) -> None:
    """If a scored token has no entry in `support_ids`, the error names its sequence and
    position."""
    engine, data = engine_of(path, "headloss"), step()
    sets = with_sets(data)
    b = 1 if way == "a row" else 0
    if way == "a row":
        sets[1] = None
    else:
        sets[0] = [*sets[0][:3], None] if way == "a token" else sets[0][:3]  # type: ignore[index, list-item]
    tu.assign_non_tensor_stack(data, "support_ids", sets)
    match = f"support_ids: sequence {b} has no set at token {0 if way == 'a row' else 3} of its"
    with pytest.raises(ValueError, match=match):
        trained(engine, data, loss_of(mode))


def test_no_sets_are_none(path: str) -> None:
    """A batch without `support_ids` is scored over the whole vocabulary, also after a step with
    `support_ids`."""
    engine, data = engine_of(path, "headloss"), step()
    want = trained(engine, data, loss_of("vanilla"))[0]
    sets = step()
    with_sets(sets)
    trained(engine, sets, loss_of("vanilla"))
    empty = step()
    tu.assign_non_tensor_stack(empty, "support_ids", [None] * B)
    for again in (empty, step()):
        got = trained(engine, again, loss_of("vanilla"))[0]
        assert got["loss"] == want["loss"]
