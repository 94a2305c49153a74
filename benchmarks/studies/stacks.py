"""Effect of an exact head on training: GRPO and GSPO in three software stacks, with equal seeds.

Page: docs/does-it-matter.md.

    python benchmarks/studies/stacks.py --json benchmarks/results/stacks.json  # an hour
    python benchmarks/studies/stacks.py --study sampling --json replay_curves.json
    python benchmarks/studies/stacks.py --quick  # a small model, on a CPU
    python benchmarks/studies/stacks.py --from benchmarks/results/stacks.json --plot ...

The study *exactness* compares stock TRL in bf16, stock TRL with `cast_lm_head_to_fp32`, and
headloss, with four updates per generation. The study *sampling* uses a sampler with top-k and
top-p; the kept ids are replayed, or log-probs are over the whole vocabulary, as in stock TRL. All
runs start from one model with large logits that spells words backward (`spelling`). Several
training runs share a GPU. A finished run leaves a file; a restarted program makes only the missing
runs.

Recorded for each generation: the reward, and the mean over tokens of the sampler's log-prob minus
the trainer's (an estimate of KL). For each step the study records the gradient's norm, and the
fraction of tokens (GRPO) or sequences (GSPO) that are wrongly clipped or wrongly not clipped. The
correct side of the clip is computed in float64 from the hidden states and weights of the run.
Before and after a training run, the model solves held-out problems by greedy decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import clip_sides
import datasets
import report
import spelling
import torch
import trl
from run import PACKAGES, about, write
from torch import Tensor
from transformers import PrinterCallback, set_seed

from headloss.integrations.trl import GRPOTrainer as HeadlossTrainer

STUDIES = {"exactness": ("stock", "cast", "headloss"), "sampling": ("sets", "whole")}
STACKS = clip_sides.STACKS | {"sets": "replayed sets", "whole": "whole vocabulary"}
CURVES = {
    "reward": "reward", "wrong": "wrong_side", "clipped": "clipped", "mismatch": "mismatch",
    "ratio": "headloss/sampling/ratio_mean", "grad_norm": "grad_norm",
}  # fmt: skip
TITLES = {
    "reward": "reward", "wrong": "wrong side of the clip, %", "clipped": "clipped, %",
    "mismatch": "sampler's log-prob less trainer's", "ratio": "trainer's / sampler's probability",
    "grad_norm": "gradient's norm",
}  # fmt: skip
SHARES = ("wrong", "clipped")
ITERATIONS = 4  # updates per generation


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of one software stack."""

    algorithm: str
    stack: str
    seed: int
    steps: int
    rate: float
    prompts: int
    group: int = 8

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.stack}-{self.seed}"

    def config(self, folder: Path, device: torch.device) -> trl.GRPOConfig:
        low, high = clip_sides.CLIP[self.algorithm]
        filters = {"top_k": 20, "top_p": 0.95} if self.stack in STUDIES["sampling"] else {}
        on_gpu = device.type == "cuda"
        return trl.GRPOConfig(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=self.prompts * self.group,
            num_generations=self.group,
            steps_per_generation=1,
            num_iterations=ITERATIONS,
            max_completion_length=spelling.COMPLETION,
            max_steps=self.steps,
            learning_rate=self.rate,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            beta=0.0,
            epsilon=low,
            epsilon_high=high,
            importance_sampling_level="sequence" if self.algorithm == "gspo" else "token",
            loss_type="grpo",
            cast_lm_head_to_fp32=self.stack == "cast",
            bf16=True,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            dataloader_pin_memory=on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=self.seed,
            **filters,
        )  # fmt: skip


# ---------------------------------------------------------------------- a single run


def _sample(inputs: dict[str, Any]) -> clip_sides.Sample:
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return clip_sides.Sample(
        ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        attended=attended,
        mask=inputs["completion_mask"].bool(),
        advantages=inputs["advantages"],
    )


@torch.no_grad()
def _exact(model: Any, batch: clip_sides.Sample, rounded: bool) -> Tensor:
    """Return [B, C] float64 log-probs of hidden states and weights, optionally rounded to
    bfloat16."""
    columns, targets = batch.mask.shape[1], batch.ids[:, -batch.mask.shape[1] :]
    with torch.autocast(batch.ids.device.type, torch.bfloat16):
        out = model.base_model(input_ids=batch.ids, attention_mask=batch.attended, use_cache=False)
    hidden, weight = out.last_hidden_state[:, -columns - 1 : -1], model.lm_head.weight
    if rounded:
        hidden, weight = hidden.to(torch.bfloat16), weight.to(torch.bfloat16)
    log_p = (hidden.double() @ weight.double().t()).log_softmax(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1)


def watched(kind: type, run: Run) -> type:
    """Return a subclass of a trainer that also records its errors against a float64 head."""
    exactness = run.stack in STUDIES["exactness"]

    class Watched(kind):  # type: ignore[misc, valid-type]
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            generated = super()._generate(*args, **kwargs)
            if run.stack == "whole":
                # For log-probs over the whole vocabulary, drop the ids that the sampler kept, but
                # not the sampler's log-probs.
                self._rows = None
            return generated

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            scored = super()._generate_and_score_completions(inputs)
            if exactness:
                model = self.accelerator.unwrap_model(self.model)
                batch = _sample(scored)
                scored["exact_old"] = _exact(model, batch, run.stack != "cast")
                self._note("mismatch", self._mismatch(scored, batch))
            return scored

        @torch.no_grad()
        def _mismatch(self, scored: dict[str, Any], batch: clip_sides.Sample) -> float:
            columns = batch.mask.shape[1]
            logits = self.model(input_ids=batch.ids, attention_mask=batch.attended).logits
            log_p = logits[:, -columns - 1 : -1].float().log_softmax(-1)
            sampler = log_p.gather(-1, batch.ids[:, -columns:, None]).squeeze(-1)
            return float((sampler - scored["old_per_token_logps"])[batch.mask].mean())

        def _note(self, name: str, value: float) -> None:
            self._metrics["train"][name].append(value)

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            if exactness:
                self._wrong_side(model, inputs)
            return super()._compute_loss(model, inputs)

        @torch.no_grad()
        def _wrong_side(self, model: Any, inputs: dict[str, Any]) -> None:
            batch, work = _sample(inputs), run.algorithm
            columns, mask = batch.mask.shape[1], batch.mask
            passes = self._get_per_token_logps_and_entropies
            new = passes(model, batch.ids, batch.attended, columns)[0]
            true_new = _exact(self.accelerator.unwrap_model(model), batch, run.stack != "cast")
            pairs = (new, inputs["old_per_token_logps"]), (true_new, inputs["exact_old"])
            ratios = [clip_sides.log_ratio(work, *pair, mask) for pair in pairs]
            its, true = (clip_sides.beyond(work, r, batch.advantages) for r in ratios)
            counted = (mask if work == "grpo" else mask[:, :1]) & (batch.advantages != 0)[:, None]
            total = max(1, int(counted.sum()))
            self._note("wrong_side", float((its != true)[counted].sum()) / total)
            self._note("clipped", float(true[counted].sum()) / total)

    Watched.__name__ = kind.__name__
    return Watched


def train(run: Run, policy: Path, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return the curves of a run, and the share of solved problems before and after."""
    letters = spelling.tokenizer()
    letters.padding_side = "left"
    model = spelling.load(policy, device)
    held_out = spelling.HELD_OUT[256:]
    before = spelling.solved(model, held_out, device)
    problems = spelling.training_words(run.seed, 8192)
    kind = trl.GRPOTrainer if run.stack in ("stock", "cast") else HeadlossTrainer
    set_seed(run.seed)
    trainer = watched(kind, run)(
        model=model,
        reward_funcs=spelling.reward,
        args=run.config(folder, device),
        train_dataset=datasets.Dataset.from_list(spelling.rows(problems)),
        processing_class=letters,
    )
    trainer.remove_callback(PrinterCallback)
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = CURVES | ({} if run.stack in STUDIES["exactness"] else {"mismatch": SAMPLED_KL})
    found = {curve: [e[name] for e in log if name in e] for curve, name in names.items()}
    after = spelling.solved(model, held_out, device)
    return {
        "algorithm": run.algorithm, "stack": run.stack, "seed": run.seed, "rate": run.rate,
        "before": before, "after": after, "seconds": seconds, **found,
    }  # fmt: skip


SAMPLED_KL = "headloss/sampling/kl"


# ---------------------------------------------------------------------- all runs


def missing(runs: list[Run], folder: Path) -> list[Run]:
    return [run for run in runs if not (folder / f"{run.name}.json").exists()]


def make(runs: list[Run], command: list[str], folder: Path, processes: int, until: float) -> None:
    """Start each of `runs` in a separate process, with at most `processes` processes at a time;
    start no run after the time `until`."""
    waiting, working = missing(runs, folder), {}
    gpus = itertools.cycle(range(max(1, torch.cuda.device_count())))
    while waiting or working:
        while waiting and len(working) < processes and time.monotonic() < until:
            run = waiting.pop(0)
            one = ["--one", run.algorithm, run.stack, str(run.seed)]
            log = (folder / f"{run.name}.log").open("w")
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(next(gpus))}
            working[run.name] = (
                subprocess.Popen([*command, *one], stdout=log, stderr=log, env=environment),
                log,
            )
        for name, (process, log) in list(working.items()):
            if process.poll() is not None:
                log.close()
                del working[name]
                print(f"{name}: {'done' if process.returncode == 0 else 'failed'}", flush=True)
        if not working and time.monotonic() >= until:
            return
        time.sleep(0.2)


def gathered(runs: list[Run], folder: Path) -> list[dict[str, Any]]:
    paths = [folder / f"{run.name}.json" for run in runs]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


# ---------------------------------------------------------------------- table and figure


def _mean(values: list[float]) -> str:
    """Format the mean over seeds and the standard error of the mean."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.4f} ± {error:.4f}"


def by_stack(results: dict[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    for algorithm in clip_sides.CLIP:
        for stack in STACKS:
            keys = (algorithm, stack)
            rows = [r for r in results["runs"] if (r["algorithm"], r["stack"]) == keys]
            if rows:
                yield algorithm, stack, rows


def table(results: dict[str, Any]) -> str:
    """Return a table of means over seeds with standard errors, of last generations and of whole
    runs."""
    heads = ("loss", "stack", "seeds", "solved before", "after", "reward, last 5 generations")
    curves = [c for c in CURVES if c != "reward" and any(r[c] for r in results["runs"])]
    lines = [(*heads, *(TITLES[c].removesuffix(", %") for c in curves))]
    lines.append(("---", "---", *("---:",) * (len(lines[0]) - 2)))
    for algorithm, stack, rows in by_stack(results):
        lines.append((
            algorithm.upper(), STACKS[stack], str(len(rows)), _mean([r["before"] for r in rows]),
            _mean([r["after"] for r in rows]),
            _mean([statistics.fmean(r["reward"][-5:]) for r in rows]),
            *(_mean([statistics.fmean(r[c]) for r in rows]) if rows[0][c] else "-" for c in curves),
        ))  # fmt: skip
    return f"{results['machine']}, commit {results['commit']}.\n\n{report.markdown(lines)}\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Plot a row of panels per loss; a line is the mean over seeds, a band the range over seeds."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    algorithms = list(dict.fromkeys(a for a, _, _ in by_stack(results)))
    curves = [c for c in CURVES if any(r[c] for r in results["runs"])]
    size = (3.4 * len(curves), 3 * len(algorithms))
    figure, panels = plt.subplots(
        len(algorithms), len(curves), figsize=size, layout="constrained", squeeze=False
    )
    for algorithm, stack, rows in by_stack(results):
        for panel, curve in zip(panels[algorithms.index(algorithm)], curves, strict=True):
            scale = 100 if curve in SHARES else 1
            lines = [_smooth([scale * v for v in r[curve]]) for r in rows if r[curve]]
            panel.set_title(f"{algorithm.upper()}: {TITLES[curve]}", fontsize=9)
            panel.grid(alpha=0.3)
            if not lines:
                continue
            columns = list(zip(*lines, strict=True))
            each = results["steps"] / len(columns)  # Number of steps between two plotted values.
            steps = [1 + each * i for i in range(len(columns))]
            color = f"C{list(STACKS).index(stack)}"
            mean = [statistics.fmean(c) for c in columns]
            panel.plot(steps, mean, color=color, label=STACKS[stack])
            panel.fill_between(
                steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15
            )
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smooth(values: list[float], width: int = 8) -> list[float]:
    """Return the running mean of the last `width` values."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


# ---------------------------------------------------------------------- the command


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--study", choices=list(STUDIES), default="exactness")
    parser.add_argument("--algorithms", nargs="+", choices=["grpo", "gspo"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="150; 100 of the study of sampling")
    parser.add_argument("--logits", type=float, default=40, help="the largest, at the start")
    parser.add_argument("--rate-grpo", type=float, default=1e-5)
    parser.add_argument("--rate-gspo", type=float, default=1e-6)
    parser.add_argument("--processes", type=int, default=8, help="runs at once, over all GPUs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins later")
    parser.add_argument("--output", type=Path, default=Path("runs/stacks"))
    parser.add_argument("--models", type=Path, default=Path("runs/spelling"))
    parser.add_argument("--one", nargs=3, metavar=("ALGORITHM", "STACK", "SEED"))
    parser.add_argument("--quick", action="store_true", help="a small model, 8 steps, one seed")
    parser.add_argument("--from", dest="read", type=Path, help="results to draw, nothing is run")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("--json", "--markdown", "--plot"):
        parser.add_argument(name, type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    device, size, prompts = torch.device(arguments.device), spelling.Size(), 32
    steps = arguments.steps or {"exactness": 150, "sampling": 100}[arguments.study]
    seeds, folder = arguments.seeds, arguments.output / arguments.study
    if arguments.quick:
        size, prompts, seeds = spelling.SMALL, 2, 1
        steps = arguments.steps or 8
    rates = {"grpo": arguments.rate_grpo, "gspo": arguments.rate_gspo}

    def run_of(algorithm: str, stack: str, seed: int) -> Run:
        rate = rates[algorithm]
        return Run(
            algorithm=algorithm, stack=stack, seed=seed, steps=steps, rate=rate, prompts=prompts
        )

    if arguments.read is None:
        policy = spelling.saved(arguments.models, size, arguments.logits, device)
    if arguments.one:
        algorithm, stack, seed = arguments.one
        run = run_of(algorithm, stack, int(seed))
        row = train(run, policy, folder / run.name, device)
        write(folder / f"{run.name}.json", json.dumps(row) + "\n")
        return 0
    if arguments.read is not None:
        results = json.loads(arguments.read.read_text())
    else:
        folder.mkdir(parents=True, exist_ok=True)
        kinds = [
            (algorithm, stack, seed)
            # Seeds are the outer loop, so that an unfinished study has equal numbers of runs of
            # each stack.
            for seed in range(seeds)
            for algorithm in arguments.algorithms or list(rates)
            for stack in STUDIES[arguments.study]
        ]
        runs = [run_of(*kind) for kind in kinds]
        command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
        until = time.monotonic() + 60 * arguments.minutes
        make(runs, command, folder, 1 if arguments.quick else arguments.processes, until)
        results = about(device, arguments.commit, (*PACKAGES, "transformers"))
        with contextlib.suppress(FileNotFoundError):
            results["policy"] = json.loads((policy / "policy.json").read_text())
        results |= {"steps": steps, "runs": gathered(runs, folder)}
        if arguments.json is not None:
            write(arguments.json, json.dumps(results) + "\n")
        print(f"{len(results['runs'])} of {len(runs)} runs")
    print(table(results))
    if arguments.markdown is not None:
        write(arguments.markdown, table(results))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0 if arguments.read or not missing(runs, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
