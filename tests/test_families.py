"""312 models of Transformers train under `apply` as without it, although `apply` has no table of
model families.

Each model takes three training steps; the last step passes the token count `num_items_in_batch`.
Loss and gradients agree to 2e-5; a step calls `head_loss` once and materialises no logits. Vision
models with an image token also see images.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.head.reading import FAMILIES as KNOWN
from headloss.integrations.followed import HeadCall

pytest.importorskip("transformers")
import families
import transformers
from transformers.models.auto import modeling_auto

from headloss.integrations.transformers import apply, call

CASES = [f"{auto}:{name}" for auto, names in families.FAMILIES.items() for name in names.split()]
# Models whose forward needs materialised logits under `apply`, each with the reason. The
# materialised logits equal the stock model's.
REAL = {
    "causal:prophetnet": "a loss of its own over several predicted streams",
    "seq2seq:prophetnet": "a loss of its own over several predicted streams",
    "vision:chameleon": "image tokens written to -inf in its logits",
}
# Models for which `apply` cannot replace the loss and gives a warning: MobileBERT, for example,
# multiplies hidden states with its head in code of its own.
UNREACHED = {"causal:prophetnet", "seq2seq:prophetnet", "masked:mobilebert"}


class Counts:
    """Numbers of calls of `head_loss`, and of calls that materialise logits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.losses, self.real = 0, 0
        head_loss, raw = call.head_loss, HeadCall.raw

        def counted_loss(*args: Any) -> Any:
            self.losses += 1
            return head_loss(*args)

        def counted_raw(of_call: HeadCall) -> Tensor:
            self.real += 1
            return raw(of_call)

        patch.setattr(call, "head_loss", counted_loss)
        patch.setattr(HeadCall, "raw", counted_raw)


def steps(model: Any, family: str, counts: Counts | None = None) -> list[tuple[Any, ...]]:
    """Return loss, logits and gradients (by parameter) of three steps. `counts` is read before the
    logits, since reading logits materialises them."""
    optimizer, outcomes = torch.optim.SGD(model.parameters(), 1e-3), []
    kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    for index in range(3):
        inputs = families.inputs_of(model, family, index)
        if index == 2 and inspect.Parameter.VAR_KEYWORD in kinds:
            inputs["num_items_in_batch"] = torch.tensor(11)
        for seed in (torch.manual_seed, random.seed, np.random.seed):  # dropout, router noise
            seed(index)
        optimizer.zero_grad()
        out = model(**inputs)
        out.loss.backward()
        before = None if counts is None else (counts.losses, counts.real)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcomes.append((out.loss.detach(), out.logits.detach() + 0, gradients, before))
        if counts is not None:
            counts.real = before[1]
        optimizer.step()
    return outcomes


def norm(gradients: dict[str, Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5


def assert_same_steps(model: Any, family: str, counts: Counts, fused: bool, real: bool) -> bool:
    """Take the steps of a model with and without `apply`; return whether a warning was given."""
    twin = copy.deepcopy(model)
    want = steps(model, family)
    with apply(twin), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = steps(twin, family, counts)
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True), 1):
        assert mine[2].keys() == theirs[2].keys()
        torch.testing.assert_close(mine[0], theirs[0], rtol=2e-5, atol=0)
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-4)
        error = {name: mine[2][name] - gradient for name, gradient in theirs[2].items()}
        assert norm(error) <= 2e-5 * norm(theirs[2])
        assert mine[3] == (index * fused, index * real)
    return any("is not the objective" in str(w.message) for w in said)


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    auto, family = case.split(":")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of Transformers does not have it")
    model, counts = families.tiny_of(auto, family), Counts(monkeypatch)
    fused = case not in {*REAL, *UNREACHED}
    assert assert_same_steps(model, family, counts, fused, case in REAL) == (case in UNREACHED)


def test_the_list() -> None:
    """The tests cover at least 200 model families, and all families in the table of
    `Head.of_model`."""
    assert set(families.FAMILIES["causal"].split()) >= KNOWN.keys()
    assert len({case.split(":")[1] for case in CASES}) >= 200
    tested = {case.split(":")[1] for case in CASES}
    reasons = {name for names in families.MISSING for name in names.split()}
    assert not reasons & tested
    if transformers.__version__.startswith("5.23."):
        autos = "CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM MASKED_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ"
        names = [f"MODEL_FOR_{auto}_MAPPING_NAMES" for auto in autos.split()]
        assert {n for auto in names for n in getattr(modeling_auto, auto)} == reasons | tested


def test_z_loss_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bamba's own z-loss needs materialised logits once per call."""
    changes = {**families.CHANGES["bamba"], "z_loss_coefficient": 0.1}
    monkeypatch.setitem(families.CHANGES, "bamba", changes)
    model = families.tiny_of("causal", "bamba")
    assert_same_steps(model, "bamba", Counts(monkeypatch), True, True)


def test_terms_of_an_encoder_decoder() -> None:
    """Terms of an encoder-decoder use unshifted labels, independent of the encoder's mask."""
    model = families.tiny_of("seq2seq", "t5").eval()
    ids = torch.randint(2, 36, (2, 7), generator=torch.Generator().manual_seed(0))
    labels, mask = ids[:, :5].masked_fill(ids[:, :5] > 30, -100), torch.ones_like(ids)
    out = model(input_ids=ids, labels=labels, attention_mask=mask)
    logps = -torch.nn.functional.cross_entropy(
        out.logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.2
    )
    want = -(logps.sum(1) / (labels != -100).sum(1)).mean()
    terms = hl.cross_entropy(label_smoothing=0.2).over("sequence_mean")
    with apply(model, terms) as applied:
        got = model(input_ids=ids, labels=labels, attention_mask=mask)
        counted = applied.batch_of({"labels": labels, "attention_mask": mask}, labels.device)
    torch.testing.assert_close(got.loss, want)
    assert torch.equal(counted.targets, labels)
