"""Bad options, impossible schedules and bad arguments of further functions raise before any
computation."""

from __future__ import annotations

import pytest
import torch
from bad_input_case import (
    H,
    T,
    V,
    batch,
    call,
    hidden,
    no_work,  # noqa: F401
    rejects,
    targets,
    weight,
)
from torch import Tensor

import headloss as hl

# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (ValueError, "backend: got 'cuda', want one of", {"backend": "cuda"}),
        (ValueError, "schedule: got 'fast', want one of", {"schedule": "fast"}),
        (ValueError, "chunk_tokens: got 0, want a positive", {"chunk_tokens": 0}),
        (TypeError, "chunk_tokens: got '64', want", {"chunk_tokens": "64"}),
        (TypeError, "chunk_tokens: got True, want", {"chunk_tokens": True}),
        (TypeError, "chunk_tokens: got 2.0, want", {"chunk_tokens": 2.0}),
        (ValueError, "memory_budget: got -1", {"memory_budget": -1}),
        (TypeError, "memory_budget: got '1GiB'", {"memory_budget": "1GiB"}),
        (ValueError, "logits_dtype: got torch.int8", {"logits_dtype": torch.int8}),
        (ValueError, "accumulate_dtype: got torch.int32", {"accumulate_dtype": torch.int32}),
        (TypeError, "main_grad: got bool, want a tensor", {"main_grad": True}),
        (TypeError, "static: got 'no', want True or False", {"static": "no"}),
        (TypeError, "skip_rows: got 0, want True or False", {"skip_rows": 0}),
        (TypeError, "batch_invariant: got 1, want True", {"batch_invariant": 1}),
        (TypeError, "sequence_parallel: got None", {"sequence_parallel": None}),
        (TypeError, "metrics: got 'loss', want True or False", {"metrics": "loss"}),
        (TypeError, "chunks", {"chunks": 4}),
    ],
)
def test_options(error, match, given):
    rejects(error, match, lambda: hl.Options(**given))


def test_options_are_by_name():
    rejects(TypeError, "positional", lambda: hl.Options("reference"))
    rejects(
        TypeError,
        "options: got dict, want headloss.Options",
        lambda: hl.head_loss(hidden(), hl.Head(weight()), batch(), hl.grpo(), {"static": True}),
    )


ON_OPTIONS = {
    "head_loss": lambda o: hl.head_loss(hidden(), hl.Head(weight()), batch(), hl.grpo(), o),
    "logits_loss": lambda o: hl.logits_loss(hidden(T, V), batch(), hl.grpo(), options=o),
    "plan": lambda o: hl.plan(hidden(), hl.Head(weight()), batch(), hl.grpo(), o),
    "head_stats": lambda o: hl.head_stats(hidden(), hl.Head(weight()), targets(), o),
    "head_stats of a batch": lambda o: hl.head_stats(hidden(), hl.Head(weight()), batch(), o),
    "head_function": lambda o: hl.head_function(
        hidden(), hl.Head(weight()), batch(), lambda x, _: x.sum(), options=o
    ),
    "head_function, separable": lambda o: hl.head_function(
        hidden(), hl.Head(weight()), batch(), lambda x, _: x.sum(), "token", o
    ),
    "head_topk": lambda o: hl.head_topk(hidden(), hl.Head(weight()), 2, o),
}


@pytest.mark.parametrize("verb", ON_OPTIONS)
def test_options_of_another_type(verb):
    """Options of a wrong type, even falsy ones, are refused; only None means the defaults."""
    for given in ({}, {"static": True}, "", 0, torch.zeros(2), hl.Options):
        match = f"options: got {type(given).__name__}, want headloss.Options"
        rejects(TypeError, match, lambda given=given: ON_OPTIONS[verb](given))


def test_flags_of_another_type():
    for given in (0, "yes", {}, torch.ones(2)):
        rejects(
            TypeError,
            "inplace: got .* want True or False",
            lambda given=given: hl.logits_loss(hidden(T, V), batch(), hl.grpo(), inplace=given),
        )
    head, data = hl.Head(weight()), batch()
    for given in ("all", {}, [1]):
        rejects(
            ValueError,
            "separable: got .* want None, ",
            lambda given=given: hl.head_function(hidden(), head, data, lambda x, _: x.sum(), given),
        )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"dtype": torch.bfloat16},
            r"main_grad: got torch.bfloat16 \(9, 4\) .* want torch.float32",
        ),
        ({"device": "meta"}, "main_grad: got .* on meta, want .* on cpu"),
        ({"requires_grad": True}, "main_grad: .* that requires no gradient"),
    ],
)
def test_main_grad(given, match):
    rejects(ValueError, match, lambda: call(main_grad=torch.zeros(V, H, **given)))


def test_main_grad_of_another_shape():
    match = r"main_grad: got torch.float32 \(4, 9\) .*want torch.float32 \(9, 4\)"
    rejects(ValueError, match, lambda: call(main_grad=torch.zeros(H, V)))


# ---------------------------------------------------------------------- unsupported calls


def live(**given) -> Tensor:
    return hidden().requires_grad_()


@pytest.mark.parametrize(
    ("match", "make"),
    [
        (
            'schedule: got "one_pass", but the objective is segment-scoped and does not fit',
            # The memory budget is one token's logits, but a segment has four tokens.
            lambda: call(hl.gspo(), x=live(), schedule="one_pass", memory_budget=4 * V),
        ),
        (
            'schedule: got "one_pass", but the objective is batch-scoped and does not fit',
            lambda: call(
                hl.grpo().top_entropy(quantile=0.5),
                x=live(),
                schedule="one_pass",
                memory_budget=4 * V,
            ),
        ),
        (
            'schedule: got "frozen", but the head requires a gradient',
            lambda: call(x=live(), head=hl.Head(weight(requires_grad=True)), schedule="frozen"),
        ),
        (
            'schedule: got "frozen", but the head requires a gradient',
            lambda: call(
                x=live(),
                head=hl.Head(weight(), torch.zeros(V, requires_grad=True)),
                schedule="frozen",
            ),
        ),
        (
            'schedule: got "frozen", but the objective needs the gradient of more than logp',
            lambda: call(hl.grpo() + hl.z_loss(), x=live(), schedule="frozen"),
        ),
        (
            'schedule: got "frozen", but the logits are given',
            lambda: hl.logits_loss(
                hidden(T, V), batch(), hl.grpo(), options=hl.Options(schedule="frozen")
            ),
        ),
        ("sequence_parallel: needs", lambda: call(sequence_parallel=True)),
    ],
)
def test_an_explicit_schedule_that_cannot_serve(match, make):
    rejects(ValueError, match, make)


def test_an_explicit_backend_that_cannot_serve(monkeypatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        match = 'backend: got "triton", which needs a GPU, for tensors on cpu'
        rejects(ValueError, match, lambda: call(backend="triton"))
    monkeypatch.setattr("headloss.kernels._failure", lambda: "ImportError: none")
    rejects(
        ValueError, 'backend: got "triton", but triton cannot be', lambda: call(backend="triton")
    )


def test_auto_serves_what_an_explicit_choice_could_not():
    head, x = hl.Head(weight()), live()
    options = hl.Options(memory_budget=4 * V)
    plan = hl.plan(x, head, batch(), hl.gspo() + hl.z_loss(), options)
    assert plan.schedule == "recompute"
    assert "segment-scoped and does not fit" in plan.reason
    assert hl.plan(x, head, batch(), hl.gspo(), options).schedule == "frozen"


# ---------------------------------------------------------------------- further functions


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (TypeError, "logits: got list", lambda: hl.logits_loss([1.0], batch(), hl.grpo())),
        (
            TypeError,
            "logits: got .*int64|logits: got Tensor",
            lambda: hl.logits_loss(torch.zeros(T, V).long(), batch(), hl.grpo()),
        ),
        (
            ValueError,
            r"logits: got shape \(5, 9\), want the targets' \(6,\)",
            lambda: hl.logits_loss(hidden(5, V), batch(), hl.grpo()),
        ),
        (
            ValueError,
            "temperature: got 0, want > 0",
            lambda: hl.logits_loss(hidden(T, V), batch(), hl.grpo(), temperature=0),
        ),
        (
            ValueError,
            r"temperature: got shape \(5,\)",
            lambda: hl.logits_loss(hidden(T, V), batch(), hl.grpo(), temperature=torch.ones(5)),
        ),
        (
            ValueError,
            "temperature: .*requires a gradient",
            lambda: hl.logits_loss(
                hidden(T, V), batch(), hl.grpo(), temperature=torch.ones(T, requires_grad=True)
            ),
        ),
        (
            ValueError,
            "softcap: got -1, want > 0",
            lambda: hl.logits_loss(hidden(T, V), batch(), hl.grpo(), softcap=-1),
        ),
        (
            ValueError,
            "softcap: got 0, want > 0",
            lambda: hl.logits_loss(hidden(T, V), batch(), hl.grpo(), softcap=0),
        ),
        (
            ValueError,
            r"targets: got shape \(5,\), want hidden's \(6,\)",
            lambda: hl.head_stats(hidden(), hl.Head(weight()), targets(0, 1, 2, 3, 4)),
        ),
        (
            ValueError,
            r"targets: got shape \(7,\), want hidden's \(6,\)",
            lambda: hl.head_stats(hidden(), hl.Head(weight()), targets(*range(7))),
        ),
        (
            TypeError,
            "targets: got torch.float32",
            lambda: hl.head_stats(hidden(), hl.Head(weight()), torch.zeros(T)),
        ),
        (TypeError, "head: got Tensor", lambda: hl.head_stats(hidden(), weight(), targets())),
        (
            ValueError,
            r"hidden: got shape \(6, 5\)",
            lambda: hl.head_stats(hidden(T, 5), hl.Head(weight()), targets()),
        ),
        (
            ValueError,
            r"k: got 0, want an integer in 1..9",
            lambda: hl.head_topk(hidden(), hl.Head(weight()), 0),
        ),
        (ValueError, r"k: got 10, want", lambda: hl.head_topk(hidden(), hl.Head(weight()), 10)),
        (
            (ValueError, TypeError),
            r"k: got 2.5, want",
            lambda: hl.head_topk(hidden(), hl.Head(weight()), 2.5),
        ),
        (TypeError, "head: got Tensor", lambda: hl.head_topk(hidden(), weight(), 1)),
        (
            ValueError,
            "sequence_parallel: got True, want False",
            lambda: hl.head_topk(
                hidden(), hl.Head(weight()), 1, hl.Options(sequence_parallel=True)
            ),
        ),
    ],
)
def test_the_other_verbs(error, match, make):
    rejects(error, match, make)
