"""OpenRLHF's `Actor` agrees with and without headloss in place of its forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import trl_case
from parity import stubbed
from torch import Tensor

import headloss as hl

V, ROWS, LENGTH, ACTIONS = trl_case.VOCABULARY, 3, 9, 4


def index_first_axis(x: Tensor, places: Tensor) -> Tensor:
    return x[places]


def unpad_input(x: Tensor, mask: Tensor) -> tuple[Any, ...]:
    places = mask.flatten().nonzero().flatten()
    lengths = mask.sum(1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return x.flatten(0, 1)[places], places, ends, int(lengths.max()), lengths


def pad_input(x: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_zeros(rows * columns, *x.shape[1:]).index_copy(0, places, x).unflatten(
        0, (rows, columns)
    )


@pytest.fixture(scope="module", autouse=True)
def peer() -> Any:
    """Import OpenRLHF's module, with flash-attn's packing functions written in PyTorch."""
    stubbed("openrlhf", "deepspeed", "pylatexenc")
    padding, gather = ModuleType("flash_attn.bert_padding"), ModuleType("all_gather")
    vars(padding).update(
        index_first_axis=index_first_axis, pad_input=pad_input, unpad_input=unpad_input,
        rearrange=lambda x, how: x.flatten(0, 1),
    )  # fmt: skip
    vars(gather)["all_gather"] = None
    modules = {"flash_attn": ModuleType("flash_attn"), "flash_attn.utils": ModuleType("utils")}
    modules |= {"flash_attn.bert_padding": padding, "flash_attn.utils.distributed": gather}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield pytest.importorskip("openrlhf.models.actor", exc_type=ImportError)


@pytest.fixture(autouse=True)
def uninstalled(peer: Any) -> Iterator[None]:
    from headloss.integrations.openrlhf import uninstall

    before = peer.Actor.forward
    yield
    uninstall()
    assert peer.Actor.forward is before


def actor(peer: Any, family: str, packed: bool, lora: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = trl_case.load(trl_case.saved(family))
    if lora:
        names = ["q_proj", "lm_head"]
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        )
    made = peer.Actor(model, temperature=0.7)
    made.packing_samples = packed
    return made


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return left-padded tokens with their mask, and the mask [B, A] of actions."""
    ids = torch.randint(3, V, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    attended[1, :3], attended[2, -1] = 0, 0
    actions = torch.ones(ROWS, ACTIONS)
    actions[2, -1] = 0
    return ids.masked_fill(attended == 0, 0), attended, actions


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", False), ("llama", True), ("gemma2", False), ("cohere", False), ("mixtral", False)],
)
def test_log_probs_and_entropies(
    peer: Any, family: str, lora: bool, packed: bool, monkeypatch: Any
) -> None:
    """Log-probs, entropies and gradients agree with OpenRLHF's, for action tokens (PPO) and for all
    tokens (SFT, DPO)."""
    from headloss.integrations.openrlhf import install

    ids, attended, actions = batch()
    found = []
    for ours in (False, True):
        if ours:
            install()
            monkeypatch.setattr(hl.Head, "logits", lambda *_: pytest.fail("logits were made"))
        made = actor(peer, family, packed, lora)
        ask: dict[str, Any] = {"attention_mask": attended, "return_output": True}
        logps, output = made(ids, actions, return_entropy=True, **ask)
        entropy = output.entropy[:, -ACTIONS:] * actions
        every, _ = made(ids, return_logprobs=True, **ask)
        every = every * attended[:, 1:]
        loss = (logps.exp() * actions).sum() + 0.3 * entropy.square().sum()
        (loss + every.square().mean()).backward()
        gradients = [p.grad for p in made.parameters() if p.requires_grad]
        found.append([logps, entropy, every, *(g for g in gradients if g is not None)])
    assert len(found[0]) == len(found[1]) >= 7
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5)


def test_without_a_gradient_and_with_logits(peer: Any) -> None:
    """Log-probs agree with OpenRLHF's in a pass without gradients, and OpenRLHF's own forward runs
    for calls that request logits."""
    from headloss.integrations.openrlhf import install

    ids, attended, actions = batch()
    made = actor(peer, "llama", packed=False, lora=False)
    with torch.no_grad():
        want = made(ids, actions, attention_mask=attended)
        logits = made(ids, attention_mask=attended, return_output=True).logits
    install()
    with torch.no_grad():
        torch.testing.assert_close(made(ids, actions, attention_mask=attended), want)
        again = made(ids, attention_mask=attended, return_output=True).logits
        torch.testing.assert_close(again, logits)
        with pytest.raises(ValueError, match="pixel_values: is not supported here"):
            made(ids, actions, attention_mask=attended, pixel_values=ids)
