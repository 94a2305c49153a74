"""Mutation tests: random changes of the code, each run against the test suite (`make mutants`).

Cosmic Ray makes the mutants and keeps the results in a session, so that an interrupted run can
continue. For each mutant of a seeded sample, a few fast test files run until the first failure,
starting with tests of the mutated part. With `--rest` all remaining tests of `make test` run on the
surviving mutants. Tests run in forks of a process with torch already imported, since the import
takes longer than most tests. The file `report.md`, next to the session database, lists the mutants
that no test detected.

    Usage: mutants.py SESSION [--count 300] [--seed 0] [--minutes 600] [--rest] [arguments of
        pytest]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

# environment variables that must be set before torch is imported, as in `conftest.py`
ENVIRONMENT = {
    "OPENBLAS_CORETYPE": "Sandybridge",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
CONFIG = Path(__file__).with_suffix(".toml")
# Time limits of the fast tests and of the remaining tests; a mutant beyond the limit is killed.
SECONDS, SECONDS_OF_REST = 900, 7200
# Test files by module of the package; a module takes the entry with the longest prefix of its path.
OF_PART = {
    "headloss/batch": "segments batch_order bad_input wrong_values candidate_ids term_api",
    "headloss/batch/batch": "segments bad_input wrong_values trl_supervised stored_teachers",
    "headloss/batch/packing": "segments batch_order bad_input head_function support metrics",
    "headloss/batch/reduction": "segments prompts refusals parallel_options",
    "headloss/batch/support": "support",
    "headloss/batch/support_forms": "support_forms",
    "headloss/kernels/reference": "statistics candidates kernel_twins",
    "headloss/kernels/reference/pair": "statistics kernel_twins distillation",
    "headloss/kernels/reference/support": "support",
    "headloss/losses": "values policy_terms supervised_terms proximal_terms modifiers bad_input",
    "headloss/losses/arguments": "term_api check_term bad_input misuse misuse_of_terms",
    "headloss/losses/catalogue": "catalogue losses_page",
    "headloss/losses/distillation": "distillation",
    "headloss/losses/fipo": "future",
    "headloss/losses/identity": "travel",
    "headloss/losses/modifiers": "modifiers misuse bad_input",
    "headloss/losses/preference": "preference_terms trl_preference bad_input",
    "headloss/losses/real": "prompts",
    "headloss/losses/second_moment": "second_moment catalogue",
    "headloss/losses/shaped": "values gated_distillation",
    "headloss/losses/teacher": "distillation",
    "headloss/losses/term": "term_api check_term travel bad_input misuse misuse_of_terms",
    "headloss/losses/trial": "term_api check_term misuse misuse_of_terms",
    "headloss/objective": "metrics tolerance policy_terms statistics head_function",
    "headloss/objective/reads": "reads term_api check_term misuse misuse_of_terms",
    "headloss/objective/weighted": "candidate_ids metrics tolerance policy_terms statistics",
    "headloss/statistics": "metrics statistics",
    "headloss/statistics/divergence": "distillation",
    "headloss/statistics/metrics": "metrics misuse misuse_of_terms",
    "headloss/statistics/softmax": "metrics statistics gated_distillation",
    "headloss/losses/rejection": "modifiers bad_input",
    "headloss/engine": "plan misuse refusals bad_input bad_options float16 candidate_ids tolerance",
    "headloss/engine/call": "plan misuse refusals bad_input bad_options tolerance parallel_options",
    "headloss/engine/checks": "misuse refusals bad_input bad_options distillation",
    "headloss/engine/operator": "head_stats head_stats_candidates",
    "headloss/engine/requirements": "plan bad_input bad_options candidate_ids kernel_twins",
    "headloss/logits": "statistics",
    "headloss/logits/accumulators": "statistics head_function",
    "headloss/logits/beside": "candidate_ids candidates support_candidates",
    "headloss/logits/given": "verbs distillation given",
    "headloss/logits/linear": "statistics candidates kernel_twins",
    "headloss/logits/rows": "statistics kernel_twins",
    "headloss/logits/support": "support",
    "headloss/logits/teacher": "distillation wrong_values",
}
OF_ALL = "edges silent_results"


def first_tests(module: str) -> list[str]:
    part = max((part for part in OF_PART if module.startswith(part)), key=len)
    names = dict.fromkeys(f"{OF_PART[part]} {OF_ALL}".split())
    return [f"tests/test_{name}.py" for name in names]


def keep_a_sample(db: WorkDB, count: int, seed: int) -> None:
    """Keep one mutant at each of `count` random places in the code, however many operators apply to
    a place."""
    config = tomllib.loads(CONFIG.read_text())["cosmic-ray"]
    excluded = re.compile("|".join(config["filters"]["operators-filter"]["exclude-operators"]))
    places: dict[tuple[str, tuple[int, int], str], list[WorkItem]] = {}
    for item in db.work_items:
        (mutation,) = item.mutations
        if not excluded.match(mutation.operator_name):
            family = mutation.operator_name.partition("_")[0]
            place = str(mutation.module_path), mutation.start_pos, family
            places.setdefault(place, []).append(item)
    generator = random.Random(seed)
    sample: list[WorkItem] = []
    for place in generator.sample(sorted(places), len(places)):
        items = sorted(places[place], key=lambda item: item.mutations[0].operator_name)
        item = generator.choice(items)
        if len(sample) < count and compiles(item.mutations[0]):
            sample.append(item)
    db.clear()
    db.add_work_items(sample)


def compiles(mutation: MutationSpec) -> bool:
    """Return True if the mutated source compiles; mutations of the `*` in a parameter list are
    excluded."""
    operator, text = get_operator(mutation.operator_name), mutation.module_path.read_text()
    line, column = mutation.start_pos
    if text.splitlines()[line - 1].startswith("*,", column):
        return False
    source = mutate_code(text, operator(**mutation.operator_args), mutation.occurrence)
    try:
        return source is not None and compile(source, "", "exec") is not None
    except SyntaxError:
        return False


def failure(arguments: list[str], seconds: int) -> str | None:
    """Return the output of the first failing test, None if all tests pass."""
    log = Path("mutant.log")
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)  # ends the process
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        options = ["-x", "-q", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*options, *arguments]))
    try:
        _, status = os.waitpid(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # includes child processes
    if os.WIFSIGNALED(status):
        return f"{signal.Signals(os.WTERMSIG(status)).name}\n{log.read_text()[-2000:]}"
    return log.read_text()[-2000:] if status else None


def run(db: WorkDB, item: WorkItem, tests: list[str], seconds: int = SECONDS) -> None:
    (mutation,) = item.mutations
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    started = time.time()
    with use_mutation(mutation.module_path, operator, mutation.occurrence) as (old, new):
        failed = failure(tests, seconds)
    changed = difference(old, new)
    outcome = TestOutcome.SURVIVED if failed is None else TestOutcome.KILLED
    result = WorkResult(WorkerOutcome.NORMAL, failed or " ".join(tests), outcome, changed)
    db.set_result(item.job_id, result)
    where = f"{mutation.module_path}:{mutation.start_pos[0]}"
    print(f"{time.time() - started:4.0f} s {outcome.value} {where}", flush=True)


def difference(old: str, new: str) -> str:
    """Return the changed lines."""
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    return "\n".join(f"- {a}\n+ {b}" for a, b in pairs if a != b)


def report(db: WorkDB) -> Iterator[str]:
    tested = [(item, r) for item, r in db.completed_work_items if r.test_outcome is not None]
    survivors = [(item.mutations[0], r) for item, r in tested if not r.is_killed]
    killed = len(tested) - len(survivors)
    late = sum((result.output or "").startswith("SIGALRM") for _, result in tested)
    yield f"{len(tested)} mutants, {killed} killed ({killed / max(1, len(tested)):.1%}), "
    yield f"{late} of them by time; {len(db.pending_work_items)} to be tested.\n"
    for mutation, result in survivors:
        yield f"\n{mutation.module_path}:{mutation.start_pos[0]}, {mutation.operator_name}\n"
        yield f"\n```diff\n{result.diff}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("session", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--rest", action="store_true")
    asked, more = parser.parse_known_args()
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True
    import torch  # imported before forks

    torch.set_num_threads(1)
    end = time.time() + 60 * asked.minutes
    with use_db(asked.session, WorkDB.Mode.open) as db:
        if db.num_work_items > asked.count:
            keep_a_sample(db, asked.count, asked.seed)
        if not db.num_results:
            every = sorted({path for part in OF_PART for path in first_tests(part)})
            if failed := failure([*every, *more], SECONDS_OF_REST):
                sys.exit(f"tests fail without a mutant\n{failed}")
        for item in sorted(db.pending_work_items, key=lambda item: item.job_id):
            if time.time() < end:
                run(db, item, [*first_tests(str(item.mutations[0].module_path)), *more])
        for item, result in db.completed_work_items if asked.rest else ():
            if not result.is_killed and "--ignore" not in result.output:
                done = first_tests(str(item.mutations[0].module_path))
                others = [f"--ignore={path}" for path in done]
                run(db, item, [*others, "tests", "headloss", *more], SECONDS_OF_REST)
        asked.session.with_name("report.md").write_text("".join(report(db)))


if __name__ == "__main__":
    main()
