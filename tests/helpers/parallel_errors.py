"""Wrong set-ups that every rank must refuse: what each rank of a test world is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parallel_cases import groups
from torch import Tensor, distributed

import headloss as hl
from headloss.logits.linear import LinearLogits
from headloss.parallel import agreement

T, H, V = 6, 4, 10


@dataclass
class Setup:
    """A call that is right, for each case to spoil on one rank."""

    rank: int
    group: Any
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    segments: hl.Segments
    objective: Any
    options: hl.Options
    head: dict[str, Any]

    @property
    def last(self) -> bool:
        return self.rank == distributed.get_world_size() - 1

    def run(self, verb: Callable[..., Any] = hl.head_loss) -> Any:
        batch = hl.Batch(
            self.targets,
            self.segments,
            advantages=self.advantages,
            old_logps=torch.full((T,), -1.0),
        )
        head = hl.Head(self.weight, **self.head)
        return verb(self.hidden, head, batch, self.objective, self.options)


Spoil = Callable[[Setup], None]


def setup(over: str) -> Setup:
    world = distributed.get_world_size()
    _, group = groups(1, world)
    segments = hl.Segments.from_lengths([4, 2])
    if over == "segments":
        segments = hl.Segments.from_ids(segments.ids, count=2, group=group)
    return Setup(
        rank=distributed.get_rank(),
        group=group,
        hidden=torch.ones(T, H).requires_grad_(),
        weight=torch.ones(V, H).requires_grad_(),
        targets=torch.arange(T) % V,
        advantages=torch.ones(2),
        segments=segments,
        objective=hl.gspo(),
        options=hl.Options(check_ranks=True),
        head={"vocab_group": group} if over == "vocabulary" else {},
    )


def targets(s: Setup) -> None:
    if s.last:
        s.targets = s.targets.flip(0)


def fields(s: Setup) -> None:
    if s.last:
        s.advantages = 2 * s.advantages


def candidates(s: Setup) -> None:
    ids = torch.arange(2).expand(T, 2) + s.last
    batch, head = hl.Batch(s.targets, candidate_ids=ids), hl.Head(s.weight, **s.head)
    s.run = lambda: hl.head_loss(  # type: ignore[method-assign]
        s.hidden, head, batch, hl.cross_entropy(), s.options
    )


def wide_field(s: Setup, k: int, more: int = 0) -> None:
    """A field [T, K] of which the last rank was given other values, or more of them."""
    many = torch.full((T, k + more * s.last), float(s.last and not more))
    batch, head = hl.Batch(s.targets, many=many), hl.Head(s.weight, **s.head)
    s.run = lambda: hl.head_loss(  # type: ignore[method-assign]
        s.hidden, head, batch, hl.cross_entropy(), s.options
    )


def autocast(s: Setup) -> None:
    batch, head = hl.Batch(s.targets), hl.Head(s.weight, **s.head)

    def run() -> hl.Output:
        with torch.autocast("cpu", enabled=s.last):
            return hl.head_loss(s.hidden, head, batch, hl.cross_entropy())

    s.run = run  # type: ignore[method-assign]


def width(s: Setup) -> None:
    if s.last:
        s.hidden, s.weight = torch.ones(T, H + 1), torch.ones(V, H + 1)


def dtype(s: Setup) -> None:
    if s.last:
        s.hidden, s.weight = s.hidden.double(), s.weight.double()


def mismatch(s: Setup) -> None:
    if s.last:
        s.weight = torch.ones(V, H + 1)


def kind(s: Setup) -> None:
    if s.last:
        s.objective = "gspo"


def outside(s: Setup) -> None:
    s.targets = s.targets.clone()
    s.targets[2] = V * distributed.get_world_size()


def outside_on_one(s: Setup) -> None:
    if s.last:
        s.targets = s.targets.clone()
        s.targets[2] = V


def count(s: Setup) -> None:
    if s.last:
        s.segments = hl.Segments.from_ids(s.segments.ids, count=3, group=s.group)
        s.advantages = torch.ones(3)


def kinds_of_a_field(s: Setup) -> None:
    s.advantages = torch.ones(T if s.last else 2)


def objective(s: Setup) -> None:
    if s.last:
        s.objective = hl.gspo(epsilon_low=0.1)


def options(s: Setup) -> None:
    if s.last:
        s.options = hl.Options(chunk_tokens=2, check_ranks=True)


def gradient(s: Setup) -> None:
    if s.last:
        s.hidden = s.hidden.detach()


def temperature(s: Setup) -> None:
    s.head["temperature"] = 0.5 if s.last else 1.0


def vocab_size(s: Setup) -> None:
    s.head["vocab_size"] = V * distributed.get_world_size() + 1


def nothing_scored(s: Setup) -> None:
    s.head["vocab_size"] = V


def stranger(s: Setup) -> None:
    s.head["vocab_group"] = distributed.GroupMember.NON_GROUP_MEMBER


def stranger_of_segments(s: Setup) -> None:
    s.segments = hl.Segments.from_ids(
        s.segments.ids, count=2, group=distributed.GroupMember.NON_GROUP_MEMBER
    )


def tokens(s: Setup) -> None:
    s.options = hl.Options(sequence_parallel=True)


def alone(s: Setup) -> None:
    s.options, s.head = hl.Options(sequence_parallel=True), {}


def bad_k(s: Setup) -> None:
    s.run = lambda: hl.head_topk(  # type: ignore[method-assign]
        s.hidden, hl.Head(s.weight, **s.head), 3 if s.last else 4
    )


def bad_logits(s: Setup) -> None:
    batch = hl.Batch(s.targets)
    logits = torch.ones(T, V, dtype=torch.float64 if s.last else torch.float32)
    s.run = lambda: hl.logits_loss(  # type: ignore[method-assign]
        logits, batch, hl.cross_entropy(), vocab_group=s.group
    )


CASES: dict[str, tuple[str, Spoil, str]] = {
    "targets": ("vocabulary", targets, "targets: differs between the ranks of vocab_group"),
    "fields": ("vocabulary", fields, "values of fields: differs"),
    "candidates": ("vocabulary", candidates, "candidate_ids: differs"),
    "narrow": ("vocabulary", lambda s: wide_field(s, 3), "values of fields: differs"),
    "wide": ("vocabulary", lambda s: wide_field(s, 600), "values of fields: differs"),
    "wider": ("vocabulary", lambda s: wide_field(s, 3, more=1), "fields: differs"),
    "autocast": ("vocabulary", autocast, "dtype: differs"),
    "width": ("vocabulary", width, r"hidden width: differs .*got \[4,.* 5\]"),
    "dtype": ("vocabulary", dtype, "dtype: differs"),
    "mismatch": ("vocabulary", mismatch, "hidden: got shape .*want .*5"),
    "kind": ("vocabulary", kind, "objective: got str"),
    "outside": ("vocabulary", outside, "targets: got .* at position 2, want -100 or 0 <= target"),
    "objective": ("vocabulary", objective, "objective: differs"),
    "options": ("vocabulary", options, "options: differs"),
    "gradient": ("vocabulary", gradient, "hidden.requires_grad: differs"),
    "temperature": ("vocabulary", temperature, "temperature: differs"),
    "vocab_size": ("vocabulary", vocab_size, "vocab_size: got .* want at most"),
    "nothing_scored": ("vocabulary", nothing_scored, "weight: got .* at least one on each rank"),
    "stranger": ("vocabulary", stranger, "vocab_group: got .* want a process group that this rank"),
    "tokens": ("vocabulary", tokens, "hidden: got .* tokens on the ranks .* want 6 in all"),
    "alone": ("vocabulary", alone, "sequence_parallel: needs a head with a vocab_group"),
    "k": ("vocabulary", bad_k, "k: differs"),
    "logits": ("vocabulary", bad_logits, "dtype: differs"),
    "target of one": ("segments", outside_on_one, "targets: got 10 at position 2"),
    "kind of one": ("segments", kind, "objective: got str"),
    "count": ("segments", count, r"segments.count: differs between .*got \[2,.* 3\]"),
    "kinds of a field": ("segments", kinds_of_a_field, "advantages: is per token on some ranks"),
    "objective of segments": ("segments", objective, "objective: differs"),
    "gradients of segments": ("segments", lambda s: s.last and freeze(s), "a gradient is wanted"),
    "stranger of segments": ("segments", stranger_of_segments, "segments.group: got"),
}


def freeze(s: Setup) -> None:
    s.hidden, s.weight = s.hidden.detach(), s.weight.detach()


def refuse(name: str, *verb: Callable[..., Any]) -> tuple[str, str]:
    """The error of a case on this rank; then a call that is right must still work."""
    over, spoil, _ = CASES[name]
    spoiled = setup(over)
    spoil(spoiled)
    found = ("", "nothing was raised")
    try:
        spoiled.run(*verb)
    except (ValueError, TypeError) as error:
        found = (type(error).__name__, str(error))
    assert setup(over).run().loss.isfinite()
    return found


def crossed() -> tuple[str, str]:
    """On a grid, an error of one vocabulary group reaches the ranks that share its segments."""
    data, vocab = groups(2, 2)
    s = setup("vocabulary")
    s.head["vocab_group"] = vocab
    s.segments = hl.Segments.from_ids(s.segments.ids, count=2, group=data)
    if s.rank == 3:
        s.targets = s.targets.flip(0)
    try:
        s.run()
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def resized() -> None:
    """Heads of different sizes in turn on one group, of which the last rank's slice alone grows and
    shrinks: results are those of one rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    torch.manual_seed(0)
    hidden, whole = torch.randn(T, H).double(), torch.randn(V * world + 2, H).double()
    for more, unscored in ((0, 0), (0, 0), (2, 0), (0, 3), (2, 3), (2, 0), (0, 0)):
        vocabulary = V * world + more
        own = slice(V * rank, V * rank + V + more * (rank == world - 1))
        targets = torch.arange(T) + vocabulary - T  # of a larger vocabulary than that before
        targets[:unscored] = -100
        leaves = [t.clone().requires_grad_() for t in (hidden, whole[own], whole[:vocabulary])]
        heads = hl.Head(leaves[1], vocab_group=group), hl.Head(leaves[2])
        got, want = (
            hl.head_loss(leaves[0], head, hl.Batch(targets), hl.cross_entropy() + hl.z_loss())
            for head in heads
        )
        found = torch.autograd.grad(got.loss, leaves[:2])
        right = torch.autograd.grad(want.loss, leaves[::2])
        pairs = ((got.loss, want.loss), (found[0], right[0]), (found[1], right[1][own]))
        assert all((one - other).abs().max() < 1e-12 for one, other in pairs)


def nested() -> None:
    """As `resized`, of a call whose loss makes another call on the same group in the middle."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    torch.manual_seed(0)
    hidden, whole = torch.randn(T, H).double(), torch.randn(V * world + 2, H).double()

    def loss(head: hl.Head, targets: Tensor) -> Any:
        def of(logps: Tensor, entropies: Tensor) -> Tensor:
            other = hl.head_stats(hidden, head, targets).logp.detach()
            return -(logps * other.exp() + entropies).sum()

        return of

    for more in (0, 0, 2, 0, 2, 0):
        vocabulary = V * world + more
        own = slice(V * rank, V * rank + V + more * (rank == world - 1))
        targets = torch.arange(T) + vocabulary - T
        leaves = [t.clone().requires_grad_() for t in (hidden, whole[own], whole[:vocabulary])]
        heads = hl.Head(leaves[1], vocab_group=group), hl.Head(leaves[2])
        others = hl.Head(whole[own], vocab_group=group), heads[1]
        got, want = (
            hl.head_function(leaves[0], head, hl.Batch(targets), loss(plain, targets), "token")
            for head, plain in zip(heads, others, strict=True)
        )
        found = torch.autograd.grad(got, leaves[:2])
        right = torch.autograd.grad(want, leaves[::2])
        pairs = ((got, want), (found[0], right[0]), (found[1], right[1][own]))
        assert all((one - other).abs().max() < 1e-12 for one, other in pairs), more


@contextmanager
def gathers() -> Iterator[list[str]]:
    """What a rank gathers and measures: records, other exchanges, products."""
    seen: list[str] = []
    record, product = agreement._gathered, LinearLogits.raw

    def noted(name: str, run: Any) -> Any:
        return lambda *args: (seen.append(name), run(*args))[1]

    agreement._gathered = noted("record", record)
    LinearLogits.raw = noted("product", product)  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        agreement._gathered, LinearLogits.raw = record, product  # type: ignore[method-assign]


def one_record() -> list[list[str]]:
    """What a rank does in a group's first call, in the next ones, under `check_ranks`, and where
    nothing is scored."""
    _, known = groups(1, distributed.get_world_size())
    fresh = distributed.new_group(distributed.get_process_group_ranks(known))
    found = []
    for ids, check in ((0, False), (1, False), (2, True), (None, False)):
        s = setup("vocabulary")
        s.head, s.options = {"vocab_group": fresh}, hl.Options(check_ranks=check)
        s.targets = torch.full((T,), -100) if ids is None else torch.arange(T).roll(ids)
        with gathers() as seen:
            s.run()
        found.append([*dict.fromkeys(seen), str(seen.count("record"))])
    return found


def values_are_compared_when_asked() -> list[str]:
    """Another batch on one rank: on a group's first call, on its second, under `check_ranks`."""
    _, known = groups(1, distributed.get_world_size())
    found = []
    for check, first in ((False, True), (False, False), (True, False)):
        group = distributed.new_group(distributed.get_process_group_ranks(known))
        for wrong in (True,) if first else (False, True):
            s = setup("vocabulary")
            s.head, s.options = {"vocab_group": group}, hl.Options(check_ranks=check)
            if wrong and s.last:
                s.targets = s.targets.flip(0)
            try:
                s.run()
            except ValueError as error:
                found.append(str(error))
            else:
                found.append("")
        distributed.destroy_process_group(group)
    return found


def bad_values_of_one() -> list[str]:
    """A target outside of the vocabulary, a negative one and an id twice, on the last rank; not in
    a group's first call, which compares targets."""
    setup("vocabulary").run()
    found = []
    for spoil in (10**6, -5, None):
        s = setup("vocabulary")
        ids = torch.arange(2).expand(T, 2).clone()
        if s.last and spoil is None:
            ids[3] = 1
        elif s.last:
            s.targets[2] = spoil
        batch = hl.Batch(s.targets, candidate_ids=ids)
        arguments = s.hidden, hl.Head(s.weight, **s.head), batch, hl.cross_entropy()
        found.append(refusal(functools.partial(hl.head_loss, *arguments)))
    return found


def refusal(call: Callable[[], object]) -> str:
    """What a call says that is refused; the group of the vocabulary stays usable."""
    try:
        call()
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing was raised"
    assert setup("vocabulary").run().loss.isfinite()
    return message


WRONG_VALUES = (
    r"support_ids: got ids \[1\] at position 0, want the target, 0, among them",
    r"(support_ids|targets): got id 1000000",
    r"support_ids: differs",
    r"mask: got 0 at position 2, which is scored",
    r"temperature: got -1.0 at position 2",
    r"temperature: got -1.0 at position 2",
)


def wrong_values_of_one() -> list[str]:
    """Values that only a look at them can tell, wrong on the last rank alone, in calls that are not
    the group's first and compare none."""
    s = setup("vocabulary")
    s.run()
    own, others = torch.arange(T).unsqueeze(1), torch.full((T, 1), V)
    far = others + (10**6 - V) * s.last
    mask, temperature = torch.ones(T), torch.ones(T)
    mask[2], temperature[2] = float(not s.last), 1 - 2 * s.last
    fields: list[dict[str, Any]] = [
        {"support_ids": own + s.last},
        {"support_ids": torch.cat([own, far], 1)},
        {"support_ids": own} if s.last else {},
        {"mask": mask},
    ]
    head, warm = (hl.Head(s.weight, temperature=t, **s.head) for t in (1.0, temperature))
    calls: list[Callable[[], object]] = [
        lambda f=f: hl.head_loss(s.hidden, head, hl.Batch(s.targets, **f), hl.cross_entropy())
        for f in fields
    ]
    calls += [lambda: hl.head_stats(s.hidden, warm, s.targets)]
    calls += [lambda: hl.head_topk(s.hidden, warm, 2)]
    return [refusal(call) for call in calls]


def raises_while_traced() -> str:
    """A term that raises where it is tried, on the last rank alone."""
    s = setup("vocabulary")

    @hl.term
    def mine(stats, batch):
        return -stats.logp if not s.last else {}["missing"]

    s.objective = mine()
    try:
        s.run()
    except Exception as error:
        assert setup("vocabulary").run().loss.isfinite()
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def same_ranks_again() -> None:
    """Two groups of the same ranks in turn, groups that are destroyed and made again, and one group
    for the vocabulary and the segments: losses are those of one rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    hidden, whole = torch.randn(T, H).double(), torch.randn(V * world, H).double()
    own, targets = whole[V * rank : V * (rank + 1)], torch.arange(T) * 3 % (V * world)
    want = hl.head_loss(hidden, hl.Head(whole), hl.Batch(targets), hl.cross_entropy()).loss
    for _ in range(3):
        two = [distributed.new_group(list(range(world))) for _ in range(2)]
        for group in (*two, *two):
            head = hl.Head(own, vocab_group=group)
            got = hl.head_loss(hidden, head, hl.Batch(targets), hl.cross_entropy()).loss
            assert (got - want).abs() < 1e-12
            # Each rank has all tokens, so that the segments have each of them `world` times.
            segments = hl.Segments.from_ids(torch.zeros(T).long(), count=1, group=group)
            batch = hl.Batch(targets, segments)
            got = hl.head_loss(hidden, head, batch, hl.cross_entropy()).loss
            assert (got * world - want).abs() < 1e-12
        for group in two:
            distributed.destroy_process_group(group)


def without_tokens() -> None:
    """Ranks that hold no token of the segments, and under sequence parallelism none of the hidden
    states."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    torch.manual_seed(0)
    hidden, whole = torch.randn(T, H).double(), torch.randn(V * world, H).double()
    targets, ids = torch.arange(T) * 3 % (V * world), torch.tensor([0, 0, 0, 0, 1, 1])
    fields = {"advantages": torch.tensor([1.0, -2.0]), "old_logps": torch.full((T,), -2.0)}
    batch = hl.Batch(targets, hl.Segments.from_ids(ids), **fields)  # type: ignore[arg-type]
    want = hl.head_loss(hidden, hl.Head(whole), batch, hl.gspo()).loss
    own = slice(0, T if rank == 0 else 0)
    segments = hl.Segments.from_ids(ids[own], count=2, group=group)
    old = {"advantages": fields["advantages"], "old_logps": fields["old_logps"][own]}
    part = hl.Batch(targets[own], segments, **old)  # type: ignore[arg-type]
    got = hl.head_loss(hidden[own], hl.Head(whole), part, hl.gspo()).loss
    distributed.all_reduce(got)
    assert (got - want).abs() < 1e-12
    head = hl.Head(whole[V * rank : V * (rank + 1)], vocab_group=group)
    options = hl.Options(sequence_parallel=True)
    assert (hl.head_loss(hidden[own], head, batch, hl.gspo(), options).loss - want).abs() < 1e-12


def static_goes_by_what_was_learned() -> list[list[str]]:
    """The records of a static call: after the same call without `static`, and without one."""
    _, known = groups(1, distributed.get_world_size())
    fresh = distributed.new_group(distributed.get_process_group_ranks(known))
    found = []
    for static, more in ((False, 0), (True, 0), (True, 0), (True, 1), (True, 1)):
        s = setup("vocabulary")
        s.head, s.options = {"vocab_group": fresh}, hl.Options(static=static)
        s.weight = torch.ones(V + more, H)
        with gathers() as seen:
            s.run()
        found.append([name for name in seen if name == "record"])
    return found


def static_error_of_one() -> str:
    """A rank that fails in a static call, after others may have learned it, meets no collective."""
    s = setup("vocabulary")
    for static in (False, True):
        s.options = hl.Options(static=static)
        s.run()
    message = ""
    if s.last:
        with gathers() as seen:
            try:
                hl.head_loss(s.hidden, hl.Head(s.weight, **s.head), None, s.objective, s.options)
            except TypeError as error:
                message = str(error)
        assert seen == []
    s.run()
    return message


def compared_in_any_order() -> list[str]:
    """What ranks compare, named in another order on each; and what one of them cannot compare."""
    rank, (_, group) = distributed.get_rank(), groups(1, distributed.get_world_size())
    names = ["one", "two", "three"]
    values = {name: [torch.tensor([*name.encode()])] for name in (names, names[::-1])[rank]}
    agreement._compare("a group", group, values)
    tensors, errors = (torch.ones(2), torch.ones(2).to_sparse()), []
    for tensor in (tensors[rank], torch.ones(1 + rank)):
        with pytest.raises(Exception) as caught:
            agreement._compare("a group", group, {"one": [tensor]})
        errors.append(str(caught.value))
    return errors


def nothing_to_send() -> tuple[str, str]:
    """Calls that differ, in which there is nothing to score, hence nothing to send."""
    s = setup("vocabulary")
    assert s.run().loss.isfinite()
    s.targets = torch.full((T,), -100)
    s.head["softcap"] = 2.0 + s.last
    try:
        s.run()
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def long_error() -> str:
    """What one rank raises is not cut on the others."""
    s = setup("vocabulary")

    def prepare() -> tuple[agreement.Facts, None]:
        if s.last:
            raise ValueError("long " * 1000 + "end")
        return agreement.Facts(numbers={}, same={}, tensors=lambda _: {}, check=False), None

    with pytest.raises(ValueError) as caught:
        agreement.agree("a group", s.group, prepare)
    return str(caught.value)


def of_grid(rows: tuple[int, int] = (V, V), forms: int = 0) -> dict[str, Any]:
    """A call on two rows of ranks, which hold other tokens of the same segments, and two slices:
    the second row has fewer tokens, and a field that may be one value per token there, as it is
    (1) or is not (0) on the first."""
    data, vocab = groups(2, 2)
    row, column = divmod(distributed.get_rank(), 2)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T + 2, H, generator=generator).double()
    weight = torch.randn(sum(rows), H, generator=generator).double()
    ids = torch.tensor([0, 1] * (T // 2) + [1, 0])
    own = slice(0, T) if row == 0 else slice(T, T + 2)
    slices = slice(0, rows[0]) if column == 0 else slice(rows[0], sum(rows))
    advantages = torch.tensor([1.0, -2.0])
    if forms:
        advantages = advantages[ids[own]]
    return {
        "hidden": hidden[own].clone().requires_grad_(),
        "weight": weight[slices].clone().requires_grad_(),
        "targets": (torch.arange(T + 2) * 3 % sum(rows))[own],
        "ids": ids[own],
        "groups": (data, vocab),
        "fields": {"advantages": advantages, "old_logps": torch.full((len(ids[own]),), -2.0)},
        "whole": (hidden, weight, ids, own, slices),
    }


def run_grid(p: dict[str, Any]) -> tuple[Tensor, ...]:
    segments = hl.Segments.from_ids(p["ids"], count=2, group=p["groups"][0])
    batch = hl.Batch(p["targets"], segments, **p["fields"])
    head = hl.Head(p["weight"], vocab_group=p["groups"][1], **p.get("head", {}))
    objective = p.get("objective", hl.gspo())
    options = p.get("options", hl.Options(metrics=False))
    loss = hl.head_loss(p["hidden"], head, batch, objective, options).loss
    gradients = torch.autograd.grad(loss, (p["hidden"], p["weight"]))
    loss = loss.detach().clone()
    distributed.all_reduce(loss, group=p["groups"][0])
    return loss, *gradients


def right_on_a_grid(**changes: Any) -> None:
    """Loss and gradients of a call on the grid are those of one rank."""
    p = of_grid(**changes)
    hidden, weight, ids, own, slices = p["whole"]
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    targets = torch.arange(T + 2) * 3 % len(weight)
    order = ids.argsort(stable=True)
    batch = hl.Batch(
        targets[order],
        hl.Segments.from_ids(ids[order]),
        advantages=torch.tensor([1.0, -2.0]),
        old_logps=torch.full((T + 2,), -2.0),
    )
    want = hl.head_loss(leaves[0][order], hl.Head(leaves[1]), batch, hl.gspo()).loss
    of_hidden, of_weight = torch.autograd.grad(want, leaves)
    loss, *found = run_grid(p)
    distributed.all_reduce(found[1], group=p["groups"][0])
    for got, true in zip((loss, *found), (want, of_hidden[own], of_weight[slices]), strict=True):
        assert (got - true).abs().max() < 1e-12


def _targets(p: dict[str, Any], rank: int) -> None:
    if rank == 3:
        p["targets"] = p["targets"].flip(0)


def _shape(p: dict[str, Any], rank: int) -> None:
    if rank == 1:
        p["weight"] = p["weight"][:, :-1]


def _objective(p: dict[str, Any], rank: int) -> None:
    if rank >= 2:
        p["objective"] = hl.gspo(epsilon_low=0.1)


def _values(p: dict[str, Any], rank: int) -> None:
    if rank < 2:
        p["fields"]["advantages"] = torch.tensor([1.0, 2.0])


def _columns(p: dict[str, Any], rank: int) -> None:
    if rank in (0, 2):
        p["head"] = {"softcap": 3.0}


GRID_ERRORS = {
    "targets: differs": _targets,
    "for a weight of shape (10, 3)": _shape,
    "objective: differs": _objective,
    "its values per segment differ": _values,
    "softcap, temperature: differs": _columns,
}


def on_a_grid() -> list[str]:
    """Calls on a grid: other sizes on one rank, another form of a field on a row, and what is wrong
    on some ranks; after each of them, a call that is right."""
    rank, found = distributed.get_rank(), []
    other = {"rows": (V, V + 2)}
    for changes in ({}, {}, other, {}, {"forms": 1}, other, {}):
        right_on_a_grid(**changes)
    for spoil in GRID_ERRORS.values():
        p = of_grid()
        p["options"] = hl.Options(metrics=False, check_ranks=True)
        spoil(p, rank)
        try:
            run_grid(p)
        except (ValueError, TypeError) as error:
            found.append(str(error))
        else:
            found.append("nothing was raised")
        right_on_a_grid()
    return found


def records_on_a_grid() -> list[str]:
    """What a rank of a grid gathers in a call that both of its groups know."""
    with gathers() as seen:
        run_grid(of_grid())
    return seen
