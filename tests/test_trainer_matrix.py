"""The benchmark of trainers and wrappers tests every pair of settings, and an unsupported sharding
raises."""

from __future__ import annotations

import itertools
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trainers
from accelerate.commands.config.config_args import load_config_from_file
from trainer_cases import CHOICES, Case, as_row, pairwise

from headloss.integrations.trl.common import refuse_common

# ---------------------------------------------------------------------- the benchmark's matrix


def test_matrix_covers_all_pairs() -> None:
    """Every pair of settings occurs in some benchmark case, except pairs that are excluded by
    name."""
    cases = pairwise()
    assert len(cases) <= 40 and all(case.allowed for case in cases)
    assert len({case.name for case in cases}) == len(cases)
    for a, b in itertools.combinations(CHOICES, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert met == set(itertools.product(CHOICES[a], CHOICES[b])), (a, b)


def test_matrix_table_shows_what_is_wrong(tmp_path: Path) -> None:
    case = Case(trainer="GRPO", wrapper="fsdp2")
    row = {"loss_apart": 2e-6, "grad_norm_apart": 0.5, "metrics_apart": 0.0, "gradient_apart": 0.0}
    results = trainers.Results(tmp_path / "found.json", write=True)
    results.put(case.name, {**as_row(case), **row, "step_ms": 12.4, "reference_step_ms": 20.0})
    again = trainers.Results(tmp_path / "found.json", write=False)
    line = trainers.table(again).splitlines()[-1]
    assert line.startswith("| GRPO; fsdp2; float32 | 2e-06 | 5e-01 | 0e+00 | 0e+00 |")
    assert line.endswith("| 12 | 20 |  |  | grad_norm_apart 5.0e-01 |")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("match", "parallelism"),
    [
        ("context_parallel: is not supported", SimpleNamespace(cp_enabled=True)),
        ("sequence_parallel: is not supported", SimpleNamespace(sp_enabled=True)),
        ("", SimpleNamespace(cp_enabled=False)),
    ],
)
def test_sharding_that_is_refused(match: str, parallelism: object) -> None:
    """Unsupported sharding is refused by name before the first step."""
    accelerator = SimpleNamespace(
        unwrap_model=lambda model: model,
        parallelism_config=parallelism,
    )
    trainer = SimpleNamespace(
        accelerator=accelerator, model=None, args=SimpleNamespace(use_liger_kernel=False)
    )
    if not match:
        refuse_common(trainer, "trl.GRPOTrainer")
        return
    with pytest.raises(ValueError, match=match):
        refuse_common(trainer, "trl.GRPOTrainer")


# ---------------------------------------------------------------------- the README's command


def test_files_of_the_command(tmp_path: Path) -> None:
    """The files of the README's command are valid: accelerate reads the configuration, and
    `words.py` writes words with their reversal."""
    examples = Path(__file__).parents[1] / "examples"
    found = load_config_from_file(str(examples / "fsdp2.yaml"))
    assert found.mixed_precision == "bf16" and found.num_processes == 2
    assert found.fsdp_config["fsdp_version"] == 2  # type: ignore[attr-defined]
    words = runpy.run_path(str(examples / "words.py"))["main"]
    assert words(tmp_path / "words.jsonl", count=50) == 0
    rows = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 50
    assert all(row["prompt"] == f"{row['answer'][::-1]} -> " for row in rows)
