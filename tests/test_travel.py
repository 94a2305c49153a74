"""Every public object is equal after copying, after pickling, and in a spawned process."""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle

import pytest
import torch
import travel

import headloss as hl


def pickled(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


WAYS = (pickled, copy.deepcopy, copy.copy)
OBJECTS, TERMS = travel.objects(), travel.terms()


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_equal_after_copy_and_pickle(name: str) -> None:
    for way in WAYS:
        assert travel.same(way(OBJECTS[name]), OBJECTS[name]), way


@pytest.mark.parametrize("name", TERMS)
def test_terms_give_equal_results_after_copy_and_pickle(name: str) -> None:
    term, given = TERMS[name], travel.problem()
    want = travel.results(term, given) if travel.fits(term) else []
    for way in WAYS:
        found = way(term)
        assert found == term and hash(found) == hash(term) and repr(found) == repr(term)
        if want:
            assert all(map(torch.equal, travel.results(found, way(given)), want)), way


def test_equality_sees_every_part() -> None:
    terms = [*travel.terms().values()]
    terms += [
        hl.grpo(epsilon_low=0.1),
        hl.grpo(delta=3.0),
        hl.grpo().over("token_mean"),
        hl.grpo().weighted("share"),
        hl.grpo().where("kept"),
        hl.grpo().corrected("token_mask"),
        hl.grpo().corrected("token_mask", max=2.0),
        hl.grpo().top_entropy(quantile=0.5),
        hl.grpo().top_entropy(quantile=0.25),
        hl.distillation(teacher_head=hl.Head(torch.ones(travel.V, travel.H))),
        travel.soft(tau=1.0),
        travel.sums(scales=torch.tensor([0.0, 1.0, 3.0])),
    ]
    for i, a in enumerate(terms):
        assert [j for j, b in enumerate(terms) if a == b] == [i], a
    assert hl.gspo() + hl.kl() == hl.gspo() + 1.0 * hl.kl()
    assert hl.gspo() + hl.kl() != hl.gspo() + 2 * hl.kl() != hl.kl() + hl.gspo()
    assert hl.grpo() != "grpo" and hl.grpo() != hl.Objective.of(hl.grpo())


def test_a_function_whose_name_now_belongs_to_another_is_not_mistaken_for_it() -> None:
    """Pickling a term raises if its function's name now refers to a different function."""
    with pytest.raises(pickle.PicklingError, match="renamed"):
        pickled(travel.RENAMED)
    assert copy.copy(travel.RENAMED) == travel.RENAMED != travel.renamed()


def test_current_is_one() -> None:
    """`hl.CURRENT` stays one object: in a pickled batch it still means the log-probs of the call
    itself."""
    hidden, head, batch = travel.problem(torch.linspace(0.5, 1, travel.T))
    for found in (pickled(batch), copy.deepcopy(batch)):
        assert isinstance(found, hl.Batch) and found.old_logps is hl.CURRENT
        out = hl.head_loss(hidden, head, found, hl.grpo())
        assert float(out.metrics["grpo/ratio"]) == 1


def test_a_spawned_worker() -> None:
    ours, theirs = mp.get_context("spawn").Pipe()
    worker = mp.get_context("spawn").Process(target=travel.in_a_worker, args=(theirs,), daemon=True)
    worker.start()
    terms, problem = travel.terms(), travel.problem()
    ours.send_bytes(pickle.dumps(({**travel.objects(), "problem": problem}, terms)))
    assert ours.poll(300), "the worker has not answered"
    wrong, results = pickle.loads(ours.recv_bytes())
    worker.join(10)
    assert wrong == []
    for name, got in results.items():
        assert all(map(torch.equal, got, travel.results(terms[name], problem))), name
