"""Public objects sent to another process, and user-defined terms of a module."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.engine import plan

plan.CPU_SKIP_WORTH = 0  # worker processes do not run `conftest.py`, so repeat its setting
T, H, V = 8, 6, 11
FIELDS = ("advantages", "old_logps", "ref_logps", "sampling_logps", "kept", "share")


def _watch(stats, batch) -> dict[str, hl.Observed]:
    return {"logp": hl.Observed(stats.logp, hl.Min)}


@hl.term
def soft(stats, batch, tau=1.0):
    ratio = (stats.logp - batch.old_logps).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * batch.advantages


@hl.term(name="other", scope="segment", per="segment")
def sums(stats, batch, scales=None):
    return -batch.segments.sum(stats.logp) * (1.0 if scales is None else scales.sum())


@hl.term(observe=_watch)
def watched(stats, batch):
    return -stats.logp


@hl.term
def renamed(stats, batch):
    return -stats.logp


RENAMED = renamed()


@hl.term
def renamed(stats, batch):
    return stats.logp


def weigh(lengths: Tensor, tokens: Tensor, segments: Tensor) -> Tensor:
    return (2 * tokens).reciprocal().expand_as(lengths)


def terms() -> dict[str, hl.Term]:
    """Return a dict of terms: every term of the library with default options, terms with
    modifiers, and terms that this test module defines."""
    generator = torch.Generator().manual_seed(1)
    teacher = hl.Head(torch.randn(V, H, generator=generator))
    simple = "cross_entropy z_loss entropy unlikelihood grpo gspo gspo_token dapo bnpo luspo ppo "
    simple += "cispo reinforce sapo gmpo vespo kl dpo ipo simpo distillation "
    simple += "dft chord_phi eaft focal cpo orpo aot kto a2po on_policy_distillation sdar "
    simple += "soft_cross_entropy any_of score_centering real fipo topr"
    return {
        **{name: getattr(hl, name)() for name in simple.split()},
        "dr_grpo": hl.dr_grpo(max_completion_length=5),
        "distillation with a head": hl.distillation(teacher_head=teacher),
        "shaped": hl.rlsd_shaped(hl.grpo(), mix=0.3),
        "modified": hl.grpo()
        .corrected("sequence_mask", max=2.0)
        .off_policy_masked(0.1)
        .top_entropy(quantile=0.5),
        "restricted": hl.kl(estimator="k3").where("kept").weighted("share").over("sequence_sum"),
        "over a fixed length": hl.gspo().over(hl.fixed_length(3)),
        "over its own": hl.ppo().over(hl.Reduction("half", weigh)),
        "of a module": soft(tau=2.0),
        "of a module, of segments": sums(scales=torch.arange(3.0)),
        "of a module, plain": watched(),
    }


def problem(temperature: float | Tensor = 1.0) -> tuple[Tensor, hl.Head, hl.Batch]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lora = hl.Lora(a=normal(2, H), b=normal(V, 2), scaling=0.5)
    head = hl.Head(normal(V, H), normal(V), temperature, softcap=20.0, lora=(lora,))
    targets = torch.randint(V, (T,), generator=generator)
    targets[2] = -100
    batch = hl.Batch(
        targets,
        hl.Segments.from_lengths([2, 3, 1, 2]),
        advantages=normal(4),
        old_logps=hl.CURRENT,
        ref_logps=normal(T) - 3,
        teacher_logps=normal(T) - 3,
        candidate_ids=torch.arange(2).expand(T, 2),
        candidate_probs=torch.full((T, 2), 0.5),
        candidate_sampling_logps=torch.full((T, 2), -1.0),
        prompts=torch.tensor([7, -2, -2, 7]),
        desirable=torch.arange(4) % 3 == 0,
        reference_kl=torch.full((4,), 0.2),
        sampling_logps=normal(T) - 3,
        kept=normal(T) > 0,
        share=normal(4),
        teacher_hidden=normal(T, H),
    )
    return normal(T, H), head, batch


def objects() -> dict[str, Any]:
    """Return a dict with an instance of every public class of headloss, and with several
    objectives."""
    hidden, head, batch = problem()
    out = hl.head_loss(hidden, head, batch, hl.grpo() + 0.1 * hl.kl())
    return {
        "head": head,
        "head with temperatures": problem(torch.linspace(0.5, 1, T))[1],
        "lora": head.lora[0],
        "batch": batch,
        "segments": batch.segments,
        "rows": hl.Segments.rows(2, 3),
        "totals": hl.Totals.of(batch),
        "options": hl.Options(chunk_tokens=3, main_grad=torch.ones(V, H)),
        "current": hl.CURRENT,
        "reduction": hl.sequence_mean,
        "fixed length": hl.fixed_length(7),
        "output": out,
        "metrics": out.metrics,
        "plan": out.plan,
        "statistics": hl.head_stats(hidden, head, batch.targets),
        "topk": hl.head_topk(hidden, head, 2),
        "report": hl.check_term(hl.kl()),
        "observed": hl.Observed(torch.arange(3.0), hl.Max, per="segment"),
        "measurements": (hl.Mean(*torch.ones(2)), hl.Sum(torch.ones(())), hl.Max(torch.ones(()))),
        "objective": hl.gspo() + 2 * hl.kl() - 1e-3 * hl.entropy() + soft(tau=0.5),
        "empty": hl.Objective(()),
        "a factory": soft,
    }


def same(a: Any, b: Any) -> bool:
    """Return True if two objects have bitwise equal contents."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, hl.Term | hl.Objective):
        return bool(a == b) and hash(a) == hash(b)
    if isinstance(a, type):
        return a is b
    if isinstance(a, hl.Batch):
        names = ("targets", "segments", "totals", *FIELDS)
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, hl.Segments):
        return same((a.ids, a.count, a.lengths), (b.ids, b.count, b.lengths))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        names = [f.name for f in dataclasses.fields(a) if f.compare]
        names += ["metrics"] if hasattr(a, "metrics") else []
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)


def results(objective: hl.Term | hl.Objective, given: Any) -> list[Tensor]:
    """Return loss, gradient and a metric of an objective."""
    hidden, head, batch = given
    x = hidden.clone().requires_grad_()
    out = hl.head_loss(x, head, batch, objective)
    return [out.loss.detach(), *torch.autograd.grad(out.loss, x), out.metrics["entropy"].value]


def in_a_worker(pipe: Any) -> None:
    """Receive pickled objects and terms; send back the names of those that arrived changed, and the
    losses of the terms."""
    theirs, its_terms = pickle.loads(pipe.recv_bytes())
    own, own_terms = objects(), terms()
    wrong = [name for name in own if not same(own[name], theirs[name])]
    wrong += [name for name in own_terms if not same(own_terms[name], its_terms[name])]
    found = {n: results(t, theirs["problem"]) for n, t in its_terms.items() if fits(t)}
    pipe.send_bytes(pickle.dumps((wrong, found)))


def fits(term: hl.Term) -> bool:
    """Return True if the test problem has all inputs that the term needs; it has no teacher for
    `distillation`."""
    return term.name != "distillation"
