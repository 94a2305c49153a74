"""Train a small model by SFT and then by GSPO, and score it: `python examples/demo.py`.

The demo runs two shipped recipes from Python, as `headloss train sft` and `headloss train gspo` do
on the command line. Accuracy is measured on held-out problems.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path

import headloss as hl
from headloss import train
from headloss.engine.plan import MIB, PlanInputs, make_plan
from headloss.train import Result
from headloss.train.report import legend, score, table

QWEN = {"width": 1024, "vocabulary": 151936}  # The size of Qwen3-0.6B's head.
SAMPLER = {"gspo": ("trainer.top_p=0.95",)}  # GSPO samples by top-p; its loss is over the kept ids.


def main(output: Path = Path("runs/demo"), overrides: tuple[str, ...] = ()) -> int:
    begun = time.perf_counter()
    shutil.rmtree(output, ignore_errors=True)
    recipes, results = {}, {}
    for name, model in (("sft", "tiny"), ("gspo", str(output / "sft" / "model"))):
        print(f"\n{name}: {train.recipes()[name]}", flush=True)
        settings = [f"model={model}", f"output={output / name}", *SAMPLER.get(name, ()), *overrides]
        recipes[name] = train.recipe(name, settings)
        results[name] = train.run(recipes[name])
        if not results[name].finished:
            return 130
    minutes = (time.perf_counter() - begun) / 60
    both = train.compare([output / name for name in results], output / "compare.html")
    gspo = results["gspo"]
    lines = [accuracies(results), mismatch(gspo), pages(results, both)]
    lines.append(logits(recipes["gspo"], gspo))
    report = output / "report.md"
    report.write_text(f"# Demo, {minutes:.1f} minutes\n\n" + "\n\n".join(lines) + "\n")
    print("\n" + "\n\n".join(lines))
    print(f"\n{minutes:.1f} minutes; {report}")
    return 0


def accuracies(results: dict[str, Result]) -> str:
    sft, gspo = results["sft"], results["gspo"]
    found = {"before": sft.before, "after SFT": sft.after, "after GSPO": gspo.after}
    rows = [["model", "held-out problems"], *([k, score(v)] for k, v in found.items() if v)]
    return f"{table(rows)}\n\n{legend(gspo)}"


def mismatch(result: Result) -> str:
    """Return a sentence about the mismatch of the trainer's log-probs and the sampler's."""
    steps = [line for line in result.metrics if "headloss/sampling/kl" in line]
    first, kept = steps[0], statistics.fmean(line["headloss/sampling/kept"] for line in steps)
    at = {name: first[f"headloss/sampling/{name}"] for name in ("ratio_min", "ratio_max", "kl")}
    later = statistics.fmean(line["headloss/sampling/kl"] for line in steps)
    return (
        f"GSPO drew by top-p from {kept:.1f} ids a token, and took log-probs over these. On the "
        f"first step the ratios to the sampler's lie between {at['ratio_min']:.6f} and "
        f"{at['ratio_max']:.6f}, their KL is {at['kl']:.1e}; over the run, whose every second step "
        f"is off-policy, it is {later:.1e}."
    )


def pages(results: dict[str, Result], comparison: Path) -> str:
    """Return a list of the paths of the HTML reports, which contain the plots."""
    paths = [*(result.page for result in results.values()), comparison]
    return "\n".join(f"- {path}" for path in paths)


def logits(recipe: train.Recipe, result: Result) -> str:
    """Return the planned memory of one loss call, with plain logits and with headloss.

    The plan is made for two heads: the head of the model that this script trains, and a head as
    large as that of Qwen3-0.6B.
    """
    tokens = int(sum(line["headloss/tokens"] for line in result.metrics) / len(result.metrics))
    rows = int(result.metrics[0]["headloss/segments"])
    own = {"width": recipe.tiny.hidden_size, "vocabulary": 258}
    lines = ["Loss and gradients of one step, planned (not measured), in float32:"]
    for what, sizes in (("this model", own), ("as wide as Qwen3-0.6B", QWEN)):
        lengths = [tokens // rows + (i < tokens % rows) for i in range(rows)]
        problem = PlanInputs(
            tokens=tokens,
            width=sizes["width"],
            vocabulary=sizes["vocabulary"],
            scope="segment",
            lengths=lengths,
            element_size=4,
            weight_size=4,
            on_gpu=False,
        )
        plan = make_plan(problem, hl.Options(), "reference")
        lines.append(
            f"- {what}, {tokens} tokens x {sizes['vocabulary']}: plain logits would have taken "
            f"{plan.plain_bytes / MIB:.1f} MiB, headloss {plan.total_bytes / MIB:.1f} MiB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(overrides=tuple(sys.argv[1:])))
