"""Bad input raises before any computation; the error names the argument, its value and what is
expected."""

from __future__ import annotations

import pytest
import torch
from bad_input_case import (
    PAIR,
    H,
    S,
    T,
    V,
    batch,
    call,
    hidden,
    labelled,
    no_work,  # noqa: F401
    rejects,
    targets,
    weight,
)

import headloss as hl

# ---------------------------------------------------------------------- hidden, head


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (
            ValueError,
            r"hidden: got shape \(6, 5\), want \[.., 4\] for a weight of shape \(9, 4\)",
            lambda: call(x=hidden(T, 5)),
        ),
        (
            ValueError,
            r"hidden: got shape \(5, 4\), want the targets' \(6,\) and one more",
            lambda: call(x=hidden(5, H)),
        ),
        (
            ValueError,
            r"hidden: got shape \(2, 3, 4\), want the targets' \(6,\)",
            lambda: call(x=hidden(2, 3, H)),
        ),
        (ValueError, r"hidden: got shape \(4,\)", lambda: call(x=hidden(H))),
        (
            ValueError,
            "hidden: got torch.bfloat16, want the dtype of weight, torch.float32",
            lambda: call(x=hidden(dtype=torch.bfloat16)),
        ),
        (TypeError, "hidden: got a torch.int64", lambda: call(x=torch.zeros(T, H).long())),
        (TypeError, "hidden: got list", lambda: call(x=[1.0])),
        (
            ValueError,
            "weight: got device meta, want that of hidden, cpu",
            lambda: call(head=hl.Head(weight(device="meta"))),
        ),
        (TypeError, "head: got Tensor, want headloss.Head", lambda: call(head=weight())),
        (
            TypeError,
            r"head: got Linear, want headloss.Head or Head.of\(module\)",
            lambda: call(head=torch.nn.Linear(H, V)),
        ),
        (
            ValueError,
            r"bias: got shape \(8,\), want \(9,\)",
            lambda: hl.Head(weight(), torch.zeros(8)),
        ),
        (ValueError, "temperature: got 0, want > 0", lambda: hl.Head(weight(), temperature=0)),
        (
            ValueError,
            r"temperature: got shape \(5,\), want a number or one value per token, \(6,\)",
            lambda: call(head=hl.Head(weight(), temperature=torch.ones(5))),
        ),
        (
            ValueError,
            "temperature: .*requires a gradient",
            lambda: hl.Head(weight(), temperature=torch.ones(T, requires_grad=True)),
        ),
        (ValueError, "softcap: got -1, want > 0", lambda: hl.Head(weight(), softcap=-1)),
        (
            ValueError,
            "vocab_size: got 10, want 1 <= vocab_size <= 9",
            lambda: hl.Head(weight(), vocab_size=10),
        ),
        (
            ValueError,
            r"vocab_group: got tensor\(\[1., 1.\]\), want a process group",
            lambda: call(head=hl.Head(weight(), vocab_group=torch.ones(2))),
        ),
    ],
)
def test_hidden_and_head(error, match, make):
    rejects(error, match, make)


# ---------------------------------------------------------------------- batch


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (TypeError, "batch: got dict, want headloss.Batch", lambda: call(data={"targets": 1})),
        (TypeError, "targets: got torch.float32", lambda: batch(targets=torch.zeros(T))),
        (TypeError, "targets: got list", lambda: hl.Batch([0, 1])),
        (ValueError, "targets: got a 0-dim tensor", lambda: hl.Batch(torch.tensor(3))),
        (
            TypeError,
            "ignore_index: got True, want an integer",
            lambda: batch(ignore_index=True),
        ),
        (TypeError, "ignore_index: got 1.0, want an integer", lambda: batch(ignore_index=1.0)),
        (
            ValueError,
            rf"ignore_index: got {2**63}, want an integer of 64 bits",
            lambda: batch(ignore_index=2**63),
        ),
        (
            ValueError,
            rf"ignore_index: got {-(2**63) - 1}, want an integer of 64 bits",
            lambda: batch(ignore_index=-(2**63) - 1),
        ),
        (
            TypeError,
            "segments: got Tensor, want headloss.Segments",
            lambda: batch(segments=targets()),
        ),
        (
            ValueError,
            r"segments: got \(5,\) tokens, want the targets' shape \(6,\)",
            lambda: batch(segments=hl.Segments.from_lengths([5])),
        ),
        (
            ValueError,
            "segments: got device meta, want the targets' cpu",
            lambda: batch(segments=hl.Segments.rows(1, T, device="meta")),
        ),
        (
            ValueError,
            r"old_logps: got shape \(5,\), want \(6,\) per token$",
            lambda: batch(old_logps=torch.zeros(5)),
        ),
        (  # `old_logps` with one value per segment are refused
            ValueError,
            r"old_logps: got shape \(2,\), want \(6,\) per token$",
            lambda: batch(old_logps=torch.zeros(S)),
        ),
        (
            ValueError,
            r"advantages: got shape \(3,\), want \(6,\) per token, or \(2,\) per segment",
            lambda: batch(advantages=torch.zeros(3)),
        ),
        (
            ValueError,
            r"mine: got shape \(2, 6\), want \(6,\) per token, or \(2,\)",
            lambda: batch(mine=torch.zeros(2, 6)),
        ),
        (  # an error: a [T, 1] field would broadcast with [T] vectors to a matrix
            ValueError,
            r"sampling_logps: got shape \(6, 1\), want \(6,\) per token$",
            lambda: batch(sampling_logps=torch.zeros(T, 1)),
        ),
        (
            ValueError,
            r"advantages: got shape \(6, 3\), want \(6,\) per token",
            lambda: batch(advantages=torch.zeros(T, 3)),
        ),
        (TypeError, "advantages: got float, want a tensor", lambda: batch(advantages=1.0)),
        (TypeError, "totals: got tuple, want headloss.Totals", lambda: batch(totals=(6, 2))),
        (
            ValueError,
            "old_logps: got device meta, want the targets' cpu",
            lambda: batch(old_logps=torch.zeros(T, device="meta")),
        ),
        (TypeError, "labels: got NoneType, want an int64", lambda: hl.Batch.from_labels(None)),
        (TypeError, "labels|targets: .*int64", lambda: hl.Batch.from_labels(torch.zeros(3))),
        (
            ValueError,
            r"segments: got \(2,\) tokens, want the labels' shape \(3,\)",
            lambda: hl.Batch.from_labels(
                torch.zeros(3, dtype=torch.long), hl.Segments.from_lengths([2])
            ),
        ),
        (
            ValueError,
            r'w: got \(6,\) beside labels, want align="labels" .*shifted.* or align="targets"',
            lambda: labelled(w=torch.ones(T)),
        ),
        (
            ValueError,
            r"teacher_logits: got \(6, 2\) beside",
            lambda: labelled(teacher_logits=torch.ones(T, 2), align={}),
        ),
        (ValueError, "support_ids: got a pair beside", lambda: labelled(support_ids=PAIR)),
        (
            ValueError,
            r'support_ids: got a pair with align="labels", want \[.., K\] ids',
            lambda: labelled(support_ids=PAIR, align="labels"),
        ),
        (ValueError, "align: got 'label', want", lambda: labelled(align="label")),
        (ValueError, "align: got 7, want", lambda: labelled(w=torch.ones(T), align={"w": 7})),
        (
            ValueError,
            r"align: got \['v'\], want names of fields: \['w'\]",
            lambda: labelled(w=torch.ones(T), align={"v": "labels"}),
        ),
    ],
)
def test_batch(error, match, make):
    rejects(error, match, make)


@pytest.mark.parametrize("wrong", [V, -1, -101, 1 << 40])
@pytest.mark.parametrize("position", [0, 5])
def test_a_target_outside_the_vocabulary(wrong, position):
    values = targets()
    values[position] = wrong
    match = rf"targets: got {wrong} at position {position}, want -100 or 0 <= target < 9"
    rejects(ValueError, match, lambda: call(data=batch(targets=values)))
    rejects(
        ValueError,
        match,
        lambda: hl.plan(hidden(), hl.Head(weight()), batch(targets=values), hl.grpo()),
    )
    rejects(ValueError, match, lambda: hl.head_stats(hidden(), hl.Head(weight()), values))
    rejects(
        ValueError, match, lambda: hl.logits_loss(hidden(T, V), batch(targets=values), hl.grpo())
    )


def test_a_target_among_the_padded_rows_of_the_weight():
    head = hl.Head(weight(), vocab_size=7)
    rejects(ValueError, "targets: got 8 at position 5, want .* < 7", lambda: call(head=head))


@pytest.mark.parametrize("wrong", [-1, 2, 100])
def test_a_segment_id_outside_its_range(wrong):
    """A segment id out of range is refused at scored positions, and ignored at unscored
    positions."""
    ids = torch.tensor([0, 0, wrong, 0, 1, 1])
    data = batch(segments=hl.Segments.from_ids(ids, count=2))
    match = rf"segments: got {wrong} at position 2, want 0 <= id < 2 at a scored position"
    rejects(ValueError, match, lambda: call(data=data))
    unscored = batch(
        segments=hl.Segments.from_ids(ids, count=2), targets=targets(0, 1, -100, 3, 4, 8)
    )
    assert hl.plan(hidden(), hl.Head(weight()), unscored, hl.grpo()).schedule == "statistics"


def test_the_position_is_that_of_the_flat_batch():
    values = torch.zeros(2, 3, dtype=torch.long)
    values[1, 1] = 77
    rejects(
        ValueError,
        "targets: got 77 at position 4",
        lambda: call(hl.cross_entropy(), x=hidden(2, 3, H), data=hl.Batch(values)),
    )


@pytest.mark.parametrize("device", ["hidden", "batch"])
def test_devices(device):
    """A batch and hidden states on different devices are refused."""
    if device == "batch":
        data = hl.Batch(targets().to("meta"))
        rejects(
            ValueError,
            "targets on meta.* hidden's device cpu",
            lambda: call(hl.z_loss(), data=data),
        )
    else:
        head = hl.Head(weight(device="meta"))
        rejects(
            (ValueError, TypeError), "hidden|meta", lambda: call(x=hidden().to("meta"), head=head)
        )


# ---------------------------------------------------------------------- terms


@pytest.mark.parametrize("name", ["epsilon_low", "epsilon_high"])
@pytest.mark.parametrize(
    "factory",
    [hl.grpo, hl.gspo, hl.gspo_token, hl.dapo, hl.bnpo, hl.ppo, hl.cispo, hl.gmpo, hl.luspo],
)
def test_an_epsilon_below_zero(factory, name):
    match = rf"{factory.__name__}: {name}: got -0.1, want >= 0"
    rejects(ValueError, match, lambda: factory(**{name: -0.1}))
    rejects(ValueError, name, lambda: factory(**{name: float("nan")}))
    rejects(TypeError, rf"{name}: got '0.2', want a number", lambda: factory(**{name: "0.2"}))


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (
            ValueError,
            "cross_entropy: label_smoothing: got 2",
            lambda: hl.cross_entropy(label_smoothing=2),
        ),
        (ValueError, "grpo: delta: got 0, want > 0", lambda: hl.grpo(delta=0)),
        (ValueError, "ppo: dual_clip: got 0.5, want > 1", lambda: hl.ppo(dual_clip=0.5)),
        (
            ValueError,
            "grpo: importance_sampling_level: got 'word', want one of 'token', 'sequence'",
            lambda: hl.grpo(importance_sampling_level="word"),
        ),
        (ValueError, "kl: estimator: got 'k4', want one of", lambda: hl.kl(estimator="k4")),
        (ValueError, "dpo: beta: got 0, want > 0", lambda: hl.dpo(beta=0)),
        (ValueError, "sapo: temperature_pos: got -1", lambda: hl.sapo(temperature_pos=-1)),
        (ValueError, "divergence: got 'kl', want one of", lambda: hl.distillation(divergence="kl")),
        (ValueError, "beta: got 1, want", lambda: hl.distillation(divergence="js", beta=1)),
        (ValueError, "corrected: mode: got 'clip'", lambda: hl.grpo().corrected("clip")),
        (
            ValueError,
            "corrected: min: got 2.0, want <= max, 1.0",
            lambda: hl.grpo().corrected("token_mask", min=2.0, max=1.0),
        ),
        (ValueError, "top_entropy: quantile: got 0", lambda: hl.grpo().top_entropy(quantile=0)),
        (
            ValueError,
            "top_entropy: got quantile=None and threshold=None",
            lambda: hl.grpo().top_entropy(),
        ),
        (ValueError, "length: got 0, want > 0", lambda: hl.fixed_length(0)),
        (
            ValueError,
            r"dr_grpo: .*max_completion_length.*\.over",
            lambda: call(hl.dr_grpo()),
        ),
        (
            ValueError,
            "dr_grpo: max_completion_length: got 0",
            lambda: hl.dr_grpo(max_completion_length=0),
        ),
        (
            ValueError,
            r"teacher_topk_ids: got \[1, 1, -1\] at position 0, want distinct ids",
            lambda: call(
                hl.distillation(),
                data=batch(
                    teacher_topk_ids=torch.tensor([1, 1, -1]).expand(T, 3),
                    teacher_topk_logps=torch.full((T, 3), -2.0),
                ),
            ),
        ),
        (
            ValueError,
            r"candidate_probs: got \(1,\) at each token, want \(3,\)",
            lambda: call(
                hl.soft_cross_entropy(),
                data=batch(
                    candidate_ids=torch.arange(3).expand(T, 3), candidate_probs=torch.ones(T, 1)
                ),
            ),
        ),
        (
            ValueError,
            r"share: got \(1,\) values at each token, want one for cross_entropy",
            lambda: call(
                hl.cross_entropy().weighted("share"), data=batch(share=torch.zeros(T, 1))
            ),
        ),
        (
            ValueError,
            r"kept: got \(1,\) values at each token, want one for z_loss",
            lambda: call(hl.z_loss().where("kept"), data=batch(kept=torch.ones(T, 1).bool())),
        ),
        (TypeError, "objective: got str, want terms", lambda: call("grpo")),
        (
            ValueError,
            "term distillation: got no teacher in the batch, want one of teacher_logits",
            lambda: call(hl.distillation()),
        ),
        (
            ValueError,
            "teacher_logits: got a last dimension of 8, want the student's vocabulary, 9",
            lambda: call(hl.distillation(), data=batch(teacher_logits=torch.zeros(T, 8))),
        ),
        (
            ValueError,
            "got batch.teacher_hidden without a teacher_head",
            lambda: call(hl.distillation(), data=batch(teacher_hidden=torch.zeros(T, 8))),
        ),
    ],
)
def test_terms(error, match, make):
    rejects(error, match, make)


def test_pairs_need_an_even_number_of_segments():
    data = batch(
        segments=hl.Segments.from_lengths([1, 3, 2]), advantages=None, ref_logps=torch.zeros(T)
    )
    match = r"segments: got 3, want a multiple of 2 for 1 \* dpo"
    rejects(ValueError, match, lambda: call(hl.dpo(), data=data))
    rejects(
        ValueError,
        "segments: got 3, want a multiple of 2",
        lambda: call(hl.z_loss() + hl.simpo(), data=data),
    )
