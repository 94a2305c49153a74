"""Agreement of ranks on the arguments of a call: number of collectives, and errors of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parallel_cases import groups
from parallel_errors import H, T, V, refusal, setup
from torch import Tensor, distributed

import headloss as hl
from headloss.logits.linear import LinearLogits
from headloss.parallel import agreement


def crossed() -> tuple[str, str]:
    """Check that an error on one rank is also raised on ranks that are outside the rank's
    vocabulary group but share segments with the group."""
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
    """Check that calls on several ranks agree with calls on one rank while the vocabulary size
    changes from call to call; only the last rank's slice changes its size."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    torch.manual_seed(0)
    hidden, whole = torch.randn(T, H).double(), torch.randn(V * world + 2, H).double()
    for more, unscored in ((0, 0), (0, 0), (2, 0), (0, 3), (2, 3), (2, 0), (0, 0)):
        vocabulary = V * world + more
        own = slice(V * rank, V * rank + V + more * (rank == world - 1))
        targets = torch.arange(T) + vocabulary - T  # targets are the last ids of the vocabulary
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
    """Check calls whose loss function calls headloss again on the same process group, with
    vocabularies of alternating sizes."""
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
    """Return a context that lists, in order, this rank's comparisons of arguments with other ranks
    ("record") and its logit matmuls ("product")."""
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
    """Return a rank's collectives and matmuls in a group's first call, in later calls, under
    `check_ranks`, and without scored tokens."""
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
    """Return the errors for a batch that differs on one rank, in a group's first and second call
    and under `check_ranks`."""
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
    """Return the errors that are raised if the last rank alone has an invalid target or a
    duplicate candidate id. A valid call comes first, since only the first call on a process group
    compares targets between ranks."""
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


WRONG_VALUES = (
    r"support_ids: got ids \[1\] at position 0, want the target, 0, among them",
    r"(support_ids|targets): got id 1000000",
    r"support_ids: differs",
    r"mask: got 0 at position 2, which is scored",
    r"temperature: got -1.0 at position 2",
    r"temperature: got -1.0 at position 2",
)


def wrong_values_of_one() -> list[str]:
    """Return the errors that are raised for values that are invalid on the last rank alone. A
    valid call comes first, since only the first call on a process group compares values between
    ranks."""
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
    """Return the error of a term that raises on the last rank alone, when it is traced before the
    computation."""
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
    """Check that losses on several ranks equal the loss on one rank.

    Calls alternate between two process groups of the same ranks, and are repeated with new groups
    after these groups are destroyed. One process group serves as the head's
    `vocab_group` and as the group of the segments.
    """
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
            # Each rank has all tokens, so that the segments contain each token `world` times.
            segments = hl.Segments.from_ids(torch.zeros(T).long(), count=1, group=group)
            batch = hl.Batch(targets, segments)
            got = hl.head_loss(hidden, head, batch, hl.cross_entropy()).loss
            assert (got * world - want).abs() < 1e-12
        for group in two:
            distributed.destroy_process_group(group)


def without_tokens() -> None:
    """Check calls in which rank 1 has no tokens of the common segments, and no hidden states under
    sequence parallelism."""
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
    """Return one list for each of five calls, with one entry per comparison of arguments between
    ranks.

    The first call is not static; two static calls (fixed shapes, no device reads) of the same sizes
    follow, and then two static calls with a larger vocabulary.
    """
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
    """Check that a rank that raises an error in a call with `static=True` runs no collective, if
    an earlier call of the same sizes has compared the ranks' arguments."""
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
    """Check that ranks may list argument names in different orders; return the errors raised if
    one rank has a sparse tensor, and if a tensor's length differs between ranks."""
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
    """Return the error of a call whose soft cap differs between ranks, although no token is scored
    and nothing else is sent."""
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
    """Check that a long error of one rank is not truncated on the remaining ranks."""
    s = setup("vocabulary")

    def prepare() -> tuple[agreement.Facts, None]:
        if s.last:
            raise ValueError("long " * 1000 + "end")
        return agreement.Facts(numbers={}, same={}, tensors=lambda _: {}, check=False), None

    with pytest.raises(ValueError) as caught:
        agreement.agree("a group", s.group, prepare)
    return str(caught.value)
