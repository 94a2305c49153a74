"""Two processes: what passes through wrappers with mixed precision survives being rebuilt by them.

The trainers run as `accelerate launch` would have them; accelerate takes FSDP2 for a matter of
accelerators, which `trainer_cases.allow_sharding_on_cpus` lifts.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import trainers
from accelerate.commands.config.config_args import load_config_from_file
from test_trl_ranks import free_port
from trainer_cases import CHOICES, Case, as_row, pairwise
from trl_mixed_ranks import FORWARDS, TRAINERS

from headloss.integrations.trl.common import refuse_common


@pytest.mark.parametrize("cases", [(*FORWARDS, *TRAINERS)], ids=["all"])
def test_two_ranks(cases: tuple[str, ...], tmp_path: Path) -> None:
    script = Path(__file__).with_name("trl_mixed_ranks.py")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    paths = os.pathsep.join(filter(None, [str(script.parents[1]), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path), *cases],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-5000:]
    for case in cases:
        assert len(re.findall(rf"{case}: well on rank [01]", ran.stdout)) == 2, case


# ---------------------------------------------------------------------- the benchmark's matrix


def test_matrix_covers_all_pairs() -> None:
    """Every two values of different fields meet in a case; what no case may join, is named."""
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
    """By name, before the first step."""
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
    """accelerate reads the configuration; the task's answers are the words spelled backward."""
    examples = Path(__file__).parents[1] / "examples"
    found = load_config_from_file(str(examples / "fsdp2.yaml"))
    assert found.mixed_precision == "bf16" and found.num_processes == 2
    assert found.fsdp_config["fsdp_version"] == 2  # type: ignore[attr-defined]
    words = runpy.run_path(str(examples / "words.py"))["main"]
    assert words(tmp_path / "words.jsonl", count=50) == 0
    rows = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 50
    assert all(row["prompt"] == f"{row['answer'][::-1]} -> " for row in rows)
