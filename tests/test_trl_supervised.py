"""Supervised terms agree with TRL's SFTTrainer and PyTorch's F.cross_entropy, in float64.

B rows of T positions, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl

B, T, V, H = 3, 5, 11, 4
LENGTHS = {"random": (5, 3, 4), "one_token": (1, 1, 1), "empty_answer": (4, 0, 2)}


def problem(name: str = "random") -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, head and labels."""
    generator = torch.Generator().manual_seed([*LENGTHS].index(name))
    hidden = torch.randn(B, T, H, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.arange(T) < torch.tensor(LENGTHS[name])[:, None]
    return hidden, weight, torch.randint(V, (B, T), generator=generator).where(mask, -100)


def check(name: str, term: hl.Term | hl.Objective, want: Tensor, leaves, **fields: Tensor) -> None:
    """Check loss and gradients, padded and packed."""
    hidden, weight, labels = leaves
    wanted = (want, *torch.autograd.grad(want, (hidden, weight)))
    for keep in (..., labels != -100):
        lengths = torch.tensor(LENGTHS[name])
        segments = None if keep is ... else hl.Segments.from_lengths(lengths)
        batch = hl.Batch(labels[keep], segments, **{n: f[keep] for n, f in fields.items()})  # type: ignore[arg-type]
        out = hl.head_loss(hidden[keep], hl.Head(weight), batch, term)
        found = (out.loss, *torch.autograd.grad(out.loss, (hidden, weight)))
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_loss_type(loss_type: str, shape: str) -> None:
    trl = pytest.importorskip("trl", reason="TRL is the peer that these terms are compared with")
    leaves = hidden, weight, labels = problem(shape)
    scored = labels != -100
    log_p = (hidden @ weight.t()).log_softmax(-1)
    logps = log_p.gather(2, labels.clamp_min(0).unsqueeze(2)).squeeze(2)
    outputs = SimpleNamespace(
        log_probs=torch.where(scored, logps, 0),
        label_mask=scored,
        entropy=torch.zeros(B, T),
        is_top1=scored,
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(loss_type=loss_type, average_tokens_across_devices=False),
        accelerator=SimpleNamespace(parallelism_config=None, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    want = trl.SFTTrainer.compute_loss(trainer, lambda **kwargs: outputs, {"labels": labels})
    check(shape, hl.dft() if loss_type == "dft" else hl.cross_entropy(), want, leaves)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights(reduction: str) -> None:
    """Class weights (`weight=`) agree; PyTorch divides by the sum of the weights."""
    leaves = hidden, weight, labels = problem()
    classes = torch.rand(V, dtype=torch.float64) + 0.1
    logits = (hidden @ weight.t()).view(-1, V)
    want = F.cross_entropy(logits, labels.view(-1), classes, reduction=reduction)
    scored = labels != -100
    factor = classes[labels.clamp_min(0)]
    factor = factor / factor[scored].mean() if reduction == "mean" else factor * scored.sum()
    check("random", hl.cross_entropy().weighted("factor"), want, leaves, factor=factor)


def test_label_smoothing() -> None:
    leaves = hidden, weight, labels = problem()
    logits = (hidden @ weight.t()).view(-1, V)
    want = F.cross_entropy(logits, labels.view(-1), label_smoothing=0.3)
    check("random", hl.cross_entropy(label_smoothing=0.3), want, leaves)


@pytest.mark.parametrize("pad", [0, V // 2, V - 1])
def test_ignore_index(pad: int) -> None:
    """A custom ignore_index works for targets and for unshifted labels."""
    hidden, weight, labels = problem()
    padded = labels.where(labels != -100, pad)
    logits = hidden @ weight.t()
    want = F.cross_entropy(logits.view(-1, V), padded.view(-1), ignore_index=pad)
    batch = hl.Batch(padded, ignore_index=pad)
    torch.testing.assert_close(
        hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy()).loss, want
    )
    want = F.cross_entropy(logits[:, :-1].transpose(1, 2), padded[:, 1:], ignore_index=pad)
    batch = hl.Batch.from_labels(padded, ignore_index=pad)
    torch.testing.assert_close(
        hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy()).loss, want
    )
    with pytest.raises(TypeError, match="ignore_index: got None, want an integer"):
        hl.Batch(labels, ignore_index=None)  # type: ignore[arg-type]
