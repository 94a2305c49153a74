"""Tests of further public functions and wrappers, run on every rank of a test world.

Each test function compares a call over several ranks with the call on one rank, and raises on a
rank that differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_cases import groups, sizes
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import headloss as hl
from headloss.testing import error, trained_looking

T, H, V = 24, 8, 61
LENGTHS = (7, 1, 10, 0, 6)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


class Problem:
    """Arguments of a float64 call, which every rank holds as a whole, and this rank's slice of the
    head's vocabulary rows."""

    def __init__(self, seed: int = 0) -> None:
        self.world, self.rank = distributed.get_world_size(), distributed.get_rank()
        _, self.group = groups(1, self.world)
        hidden, weight, targets = trained_looking(T, H, V, torch.float64, seed=seed)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.targets = targets.index_fill(0, torch.tensor([3, 9]), -100)
        generator = torch.Generator().manual_seed(seed)
        rows = sizes(V, self.world, generator, 1)
        self.rows = slice(sum(rows[: self.rank]), sum(rows[: self.rank + 1]))
        self.shard = weight.detach()[self.rows].clone().requires_grad_()
        self.batch = hl.Batch(
            self.targets,
            hl.Segments.from_lengths(LENGTHS),
            advantages=torch.randn(5, generator=generator, dtype=torch.float64),
            old_logps=-torch.rand(T, generator=generator, dtype=torch.float64),
        )
        self.objective = hl.gspo() + 0.1 * hl.z_loss() - 0.01 * hl.entropy()

    def sliced(self, **options: Any) -> hl.Head:
        return hl.Head(self.shard, vocab_group=self.group, **options)


def head_stats() -> None:
    p = Problem()
    for options in ({}, {"softcap": 20.0, "temperature": torch.linspace(0.5, 2, T).double()}):
        want = hl.head_stats(p.hidden, hl.Head(p.weight, **options), p.targets)
        got = hl.head_stats(p.hidden, p.sliced(**options), p.targets)
        losses = []
        for found in (want, got):
            losses.append((found.logp * found.entropy + 0.1 * found.lse.square()).sum())
        for a, b in zip(got, want, strict=True):
            close(a.detach(), b.detach())
        into_hidden, into_weight = torch.autograd.grad(losses[0], (p.hidden, p.weight))
        found_hidden, found_shard = torch.autograd.grad(losses[1], (p.hidden, p.shard))
        close(found_hidden, into_hidden)
        close(found_shard, into_weight[p.rows])


def float16() -> None:
    """Check float16: statistics of slices are merged, and all ranks scale coefficients equally."""
    p = Problem()
    x, whole, shard = (t.detach().half().requires_grad_() for t in (p.hidden, p.weight, p.shard))
    heads = hl.Head(whole), hl.Head(shard, vocab_group=p.group)
    objective = hl.cross_entropy() + 0.1 * hl.z_loss() - 0.01 * hl.entropy()
    for given in ({}, {"chunk_tokens": 6}, {"schedule": "recompute"}, {"schedule": "held"}):
        calls = [hl.head_loss(x, head, p.batch, objective, hl.Options(**given)) for head in heads]
        (want, got), losses = calls, [call.loss for call in calls]
        assert (got.loss - want.loss).abs() < 1e-5 and error(got.logps, want.logps) < 1e-5
        into_hidden, into_weight = torch.autograd.grad(losses[0], (x, whole))
        found_hidden, found_shard = torch.autograd.grad(losses[1], (x, shard))
        assert error(found_hidden, into_hidden) < 2**-10
        assert error(found_shard, into_weight[p.rows]) < 2**-10


def external_loss() -> None:
    """Check `head_stats` and `head_function` with vocabulary slices in several schedules, with and
    without sequence parallelism."""
    p = Problem()
    mine = slice(*[0, 3, 20, T][p.rank : p.rank + 2])
    spread = p.hidden.detach()[mine].requires_grad_()
    batch = hl.Batch(p.targets)

    def loss(logp: Tensor, entropy: Tensor) -> Tensor:
        return (logp * entropy).sum() / 7

    want = loss(*hl.head_stats(p.hidden, hl.Head(p.weight), batch)[::2])
    into_hidden, into_weight = torch.autograd.grad(want, (p.hidden, p.weight))
    for given in (
        {"schedule": "held", "chunk_tokens": 6},
        {"schedule": "recompute", "chunk_tokens": 6},
        {"schedule": "held", "static": True},
    ):
        for x, rows in ((p.hidden, slice(None)), (spread, mine)):
            options = hl.Options(sequence_parallel=x is spread, **given)
            head = p.sliced()
            logp, _, entropy = hl.head_stats(x, head, batch, options, ("logp", "entropy"))
            found = [loss(logp, entropy)]
            if given["schedule"] == "recompute":
                found.append(hl.head_function(x, head, batch, loss, "token", options))
            for one in found:
                close(one.detach(), want.detach())
                got = torch.autograd.grad(one, (x, p.shard))
                close(got[0], into_hidden[rows])
                close(got[1], into_weight[p.rows])
    (into_hidden,) = torch.autograd.grad(
        hl.head_stats(p.hidden, hl.Head(p.weight), batch).logp.square().sum(), p.hidden
    )
    head = hl.Head(p.shard.detach(), vocab_group=p.group)
    for x, rows in ((p.hidden, slice(None)), (spread, mine)):
        options = hl.Options(schedule="frozen", chunk_tokens=6, sequence_parallel=x is spread)
        found = hl.head_stats(x, head, batch, options, ("logp",))
        (got,) = torch.autograd.grad(found.logp.square().sum(), x)
        close(got, into_hidden[rows])


def head_topk() -> None:
    p = Problem()
    for k in (1, 7, V):
        for options in ({}, {"logit_scale": -1.0}):
            want = hl.head_topk(p.hidden, hl.Head(p.weight, **options), k)
            got = hl.head_topk(p.hidden, p.sliced(**options), k)
            assert torch.equal(got.ids, want.ids)
            close(got.logps, want.logps)


def logits_loss() -> None:
    p = Problem()
    logits = (p.hidden @ p.weight.t()).detach()
    for inplace in (False, True):
        whole = logits.clone().requires_grad_()
        want = hl.logits_loss(whole, p.batch, p.objective, temperature=0.7)
        want.loss.backward()
        leaf = logits[:, p.rows].clone().requires_grad_()
        inner = leaf * 1.0
        got = hl.logits_loss(
            inner, p.batch, p.objective, temperature=0.7, vocab_group=p.group, inplace=inplace
        )
        got.loss.backward()
        close(got.loss.detach(), want.loss.detach())
        close(leaf.grad, whole.grad[:, p.rows])  # type: ignore[arg-type, index]


def lora_dropout() -> None:
    """Check that LoRA dropout uses the mask of rank 0 on every rank, although the ranks' random
    generators differ."""
    p, r = Problem(), 3
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(r, H, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(V, r, generator=generator, dtype=torch.float64, requires_grad=True)
    shard = b.detach()[p.rows].clone().requires_grad_()

    def adapted(b: Tensor) -> dict[str, Any]:
        return {"lora": (hl.Lora(a=a, b=b, scaling=0.5, dropout=0.4),)}

    whole, cut = hl.Head(p.weight, **adapted(b)), p.sliced(**adapted(shard))
    mine = p.hidden if p.rank else p.hidden.detach().t().contiguous().t().requires_grad_()

    def loss(hidden: Tensor, head: hl.Head, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return hl.head_loss(hidden, head, p.batch, p.objective).loss

    def stats(hidden: Tensor, head: hl.Head, seed: int) -> Tensor:
        torch.manual_seed(seed)
        found = hl.head_stats(hidden, head, p.targets)
        return (found.logp * found.entropy).sum()

    for verb in (loss, stats):
        want, got = verb(p.hidden, whole, 9), verb(mine, cut, 9 + p.rank)
        close(got.detach(), want.detach())
        into_hidden, into_a, into_b = torch.autograd.grad(want, (p.hidden, a, b))
        found_hidden, found_a, found_b = torch.autograd.grad(got, (mine, a, shard))
        close(found_hidden, into_hidden)
        close(found_a, into_a)
        close(found_b, into_b[p.rows])
    torch.manual_seed(9)
    want = hl.head_topk(p.hidden, whole, 4)
    torch.manual_seed(9 + p.rank)
    assert torch.equal(hl.head_topk(p.hidden, cut, 4).ids, want.ids)


def teacher_dropout() -> None:
    """Check that all ranks raise if the teacher's LoRA has dropout on one rank alone."""
    p = Problem()
    a, b = torch.ones(2, H, dtype=torch.float64), torch.ones(V, 2, dtype=torch.float64)
    lora = (hl.Lora(a=a, b=b, scaling=1.0, dropout=0.0 if p.rank else 0.5),)
    teacher = hl.Head(torch.ones(V, H, dtype=torch.float64), lora=lora)
    batch = hl.Batch(p.targets, teacher_hidden=p.hidden.detach())
    with pytest.raises(ValueError, match="objective: differs between the ranks"):
        hl.head_loss(p.hidden, p.sliced(), batch, hl.distillation(teacher_head=teacher))


def teacher_heads() -> None:
    """Check a teacher head that is whole on every rank, or split like the student's head."""
    p = Problem()
    generator = torch.Generator().manual_seed(7)
    other = torch.randn(V, 3, generator=generator, dtype=torch.float64)
    states = torch.randn(T, 3, generator=generator, dtype=torch.float64)
    batch = hl.Batch(p.targets, teacher_hidden=states)
    whole = hl.Head(other, softcap=20.0)

    def objective(teacher: hl.Head) -> hl.Objective:
        """Return the sum of two distillation losses: `distillation`, a sum over vocabulary
        entries, and `lk_hybrid`, which is not a sum over vocabulary entries."""
        return hl.distillation(teacher_head=teacher) + hl.lk_hybrid(teacher_head=teacher)

    options = hl.Options(per_token=("lk_hybrid/acceptance",), check_ranks=True)
    acceptance = hl.nla(teacher_head=whole)
    want = hl.head_loss(p.hidden, hl.Head(p.weight), batch, objective(whole) + acceptance, options)
    (into_hidden,) = torch.autograd.grad(want.loss, p.hidden)
    cut = hl.Head(other[p.rows], softcap=20.0, vocab_group=p.group)
    for teacher in (whole, cut):
        terms = objective(teacher) + hl.nla(teacher_head=teacher)
        got = hl.head_loss(p.hidden, p.sliced(), batch, terms, options)
        close(got.loss.detach(), want.loss.detach())
        close(torch.autograd.grad(got.loss, p.hidden)[0], into_hidden)
        values = (out.per_token["lk_hybrid/acceptance"] for out in (got, want))
        close(*values)


def top_entropy() -> None:
    """Check that a quantile of entropies counts the tokens of all ranks, although rank 0 has no
    tokens."""
    p = Problem()
    tokens = (torch.arange(T) % (p.world - 1) + 1 == p.rank).nonzero().squeeze(1)
    ids = p.batch.segments.ids[tokens]
    batch = hl.Batch(
        p.targets[tokens],
        hl.Segments.from_ids(ids, count=5, group=p.group),
        advantages=p.batch.advantages,
        old_logps=p.batch.old_logps[tokens],
    )
    term = hl.dapo().top_entropy(quantile=0.4)
    want = hl.head_loss(p.hidden, hl.Head(p.weight), p.batch, term)
    term = hl.dapo().top_entropy(quantile=0.4, group=p.group)
    got = hl.head_loss(p.hidden[tokens], hl.Head(p.weight), batch, term)
    share = got.loss.detach().clone()
    distributed.all_reduce(share)
    close(share, want.loss.detach())


def doubtful_fields() -> None:
    """Check a per-segment field on a rank with as many tokens as segments, and a per-token field
    with ranks without tokens."""
    p = Problem()
    last = p.world - 1
    owner = torch.arange(T) % last
    # 5 tokens: as many as segments, so that a shape alone does not tell a per-token from a
    # per-segment field
    owner[torch.tensor([2, 5, 8, 17, 20])] = last
    tokens = (owner == p.rank).nonzero().squeeze(1)
    kept = torch.tensor([True, False, True, True, True])
    per_segment = {"advantages": p.batch.advantages, "kept": kept}
    per_token = {
        "old_logps": p.batch.old_logps,
        "factor": torch.linspace(0, 1, T).double(),
        "odd": torch.arange(T) % 2 > 0,
    }
    objective = hl.gspo(epsilon_low=0.5, epsilon_high=0.5).where("kept") + hl.dapo().where("odd")
    objective = objective + 0.3 * hl.grpo().weighted("factor")
    whole = hl.Batch(p.targets, p.batch.segments, **per_segment, **per_token)
    want = hl.head_loss(p.hidden, hl.Head(p.weight), whole, objective)
    (into_hidden,) = torch.autograd.grad(want.loss, p.hidden)
    segments = hl.Segments.from_ids(p.batch.segments.ids[tokens], count=5, group=p.group)
    cut = {name: value[tokens] for name, value in per_token.items()}
    batch = hl.Batch(p.targets[tokens], segments, **per_segment, **cut)
    for static in (False, True):
        hidden = p.hidden.detach()[tokens].requires_grad_()
        options = hl.Options(static=static)
        got = hl.head_loss(hidden, hl.Head(p.weight), batch, objective, options)
        share = got.loss.detach().clone()
        distributed.all_reduce(share)
        close(share, want.loss.detach())
        close(torch.autograd.grad(got.loss, hidden)[0], into_hidden[tokens])
    totals = hl.Totals.of(batch)
    for name, (count, held) in hl.Totals.of(whole).kept.items():
        assert [int(n) for n in totals.kept[name]] == [int(count), int(held)], name


def static_spread() -> None:
    """Check sequence parallelism with and without static shapes, if rank 0 has no hidden states:
    ranks gather hidden states once, and each rank gets the gradient of its tokens."""
    p = Problem()
    mine = slice(*[0, 0, 20, T][p.rank : p.rank + 2])
    want = hl.head_loss(p.hidden, hl.Head(p.weight), p.batch, p.objective)
    into_hidden, into_weight = torch.autograd.grad(want.loss, (p.hidden, p.weight))
    for static in (False, True):
        options = hl.Options(static=static, sequence_parallel=True)
        hidden = p.hidden.detach()[mine].requires_grad_()
        plan = hl.plan(hidden, p.sliced(), p.batch, p.objective, options)
        tokens = T if static else len(p.targets[p.targets >= 0])
        assert plan.bytes["gathered hidden states"] == tokens * H * 8
        got = hl.head_loss(hidden, p.sliced(), p.batch, p.objective, options)
        found = torch.autograd.grad(got.loss, (hidden, p.shard))
        close(got.loss.detach(), want.loss.detach())
        close(got.logps, want.logps)
        close(found[0], into_hidden[mine])
        close(found[1], into_weight[p.rows])


def layouts() -> None:
    """Check a call in which some ranks have row-major and others column-major hidden states."""
    p = Problem()
    want = hl.head_loss(p.hidden, hl.Head(p.weight), p.batch, p.objective)
    into_hidden, into_weight = torch.autograd.grad(want.loss, (p.hidden, p.weight))
    batch = hl.Batch(p.targets.clamp_min(0), p.batch.segments, **p.batch.fields)  # type: ignore[arg-type]
    for given in (p.batch, batch):  # `batch` has no unscored tokens
        if given is batch:
            want = hl.head_loss(p.hidden, hl.Head(p.weight), given, p.objective)
            into_hidden, into_weight = torch.autograd.grad(want.loss, (p.hidden, p.weight))
        for schedule in ("one_pass", "recompute"):
            hidden = p.hidden.detach()
            hidden = hidden.t().contiguous().t() if p.rank == 0 else hidden.clone()
            hidden.requires_grad_()
            options = hl.Options(schedule=schedule)
            got = hl.head_loss(hidden, p.sliced(), given, p.objective, options)
            found = torch.autograd.grad(got.loss, (hidden, p.shard))
            close(found[0], into_hidden)
            close(found[1], into_weight[p.rows])


def dtensors() -> None:
    p = Problem()
    mesh = init_device_mesh("cpu", (p.world,), mesh_dim_names=("tp",))
    want = hl.head_loss(p.hidden, hl.Head(p.weight), p.batch, p.objective)
    into_weight = torch.autograd.grad(want.loss, p.weight)[0]
    bias = torch.zeros(V, dtype=torch.float64)
    for tied in (False, True):
        rows = nn.Parameter(distribute_tensor(p.weight.detach(), mesh, [Shard(0)]))
        offset = None if tied else distribute_tensor(bias, mesh, [Shard(0)])
        got = hl.head_loss(p.hidden, hl.Head(rows, offset), p.batch, p.objective)
        got.loss.backward()
        close(got.loss.detach(), want.loss.detach())
        assert isinstance(rows.grad, DTensor)
        close(rows.grad.full_tensor(), into_weight)
        close(
            hl.head_stats(p.hidden, hl.Head(rows), p.targets).logp.detach(),
            hl.head_stats(p.hidden, hl.Head(p.weight), p.targets).logp.detach(),
        )
    other = init_device_mesh("cpu", (p.world,), mesh_dim_names=("vocabulary",))
    rows = distribute_tensor(p.weight.detach(), other, [Shard(0)])
    named = hl.Head(rows, vocab_mesh_dim="vocabulary")
    close(hl.head_loss(p.hidden, named, p.batch, p.objective).loss.detach(), want.loss.detach())
    wrong = {
        "rows": (rows, 'mesh dimension "tp"'),
        "columns": (distribute_tensor(p.weight.detach(), mesh, [Shard(1)]), "Shard"),
        "whole": (distribute_tensor(p.weight.detach(), mesh, [Replicate()]), "full_tensor"),
    }
    for weight, words in wrong.values():
        with pytest.raises(TypeError, match=f"weight: got a DTensor.*{words}"):
            hl.head_loss(p.hidden, hl.Head(weight), p.batch, p.objective)
