"""Compare the tokens and sequences clipped under several heads with those of a float64 head.

Page: docs/does-it-matter.md.

    python benchmarks/studies/clip_sides.py --json benchmarks/results/clip_sides.json
    python benchmarks/studies/clip_sides.py --quick --device cpu                        # seconds
    python benchmarks/studies/clip_sides.py --from benchmarks/results/clip_sides.json \\
        --markdown benchmarks/results/clip_sides.md --plot benchmarks/results/clip_sides.png

Models trained to spell words backward (`spelling`), with largest logits of 20 to 60, sample groups
of completions. The policy is then trained for 1, 4 and 16 AdamW steps on the sampled completions,
with a float64 head. After the policy has moved, three heads compute the old and the new log-probs
from the same bfloat16 hidden states: stock TRL in bf16, TRL with `cast_lm_head_to_fp32`, and
headloss. The last norm's output and the head's weights are bfloat16, so that only the head's
arithmetic differs. *Wrong side*: tokens (GRPO, clip 0.2) or sequences (GSPO, clip 3e-4 and 4e-4)
that are clipped wrongly, or wrongly not clipped. *Error*: the norm of the error of the whole
model's gradient over the norm of the true gradient.

B completions of C tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import report
import spelling
import torch
from run import PACKAGES, about, write
from torch import Tensor

import headloss as hl

CLIP = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
MOVES = (1, 4, 16)
STACKS = {"stock": "TRL, bf16", "cast": "TRL, float32 cast", "headloss": "headloss"}
MOVE = ("work", "largest", "rate", "steps")
TITLES = {"wrong": "wrong side", "error": "gradient's error"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Completions of a policy: the inputs of a trainer's step, except the log-probs.

    Attributes:
        ids: [B, P + C], prompts of P tokens (padded on the left) and completions of C tokens.
        attended: [B, P + C], 0 at padding.
        mask: [B, C] bool, True at tokens of the completion.
        advantages: [B].
    """

    ids: Tensor
    attended: Tensor
    mask: Tensor
    advantages: Tensor


@torch.no_grad()
def sample(model: Any, prompts: int, group: int, seed: int = 0) -> Sample:
    """Sample `group` completions per held-out prompt at temperature 1."""
    device, letters = model.device, spelling.tokenizer()
    problems = [word for word in spelling.HELD_OUT[:prompts] for _ in range(group)]
    texts = [word + spelling.ARROW for word in problems]
    batch = letters(texts, padding=True, padding_side="left")
    ids, attended = (torch.tensor(batch[k], device=device) for k in ("input_ids", "attention_mask"))
    torch.manual_seed(seed)
    options = {"max_new_tokens": spelling.COMPLETION, "do_sample": True, "top_k": 0}
    with torch.autocast(device.type, torch.bfloat16):
        out = model.generate(input_ids=ids, attention_mask=attended, **options)
    completions = out[:, ids.shape[1] :]
    ended = (completions == letters.eos_token_id).cumsum(1)
    mask = (ended == 0) | ((ended == 1) & (completions == letters.eos_token_id))
    texts = letters.batch_decode(completions, skip_special_tokens=True)
    scores = torch.tensor(spelling.reward(texts, [w[::-1] for w in problems]), device=device)
    groups = scores.view(prompts, group)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return Sample(
        ids=out,
        attended=torch.cat([attended, mask.long()], 1),
        mask=mask,
        advantages=advantages.flatten(),
    )


# ---------------------------------------------------------------------- log-probs of each head


def _states(model: Any, batch: Sample) -> tuple[Tensor, Tensor]:
    """Return the hidden states [B, C, H] that predict the completions, and the completions [B,
    C]."""
    columns = batch.mask.shape[1]
    hidden = spelling.hidden_states(model, batch.ids, batch.attended)
    return hidden[:, -columns - 1 : -1], batch.ids[:, -columns:]


def exact(model: Any, batch: Sample) -> Tensor:
    hidden, targets = _states(model, batch)
    logits = hidden.double() @ model.lm_head.weight.double().t()
    return logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


def by_headloss(model: Any, batch: Sample) -> Tensor:
    hidden, targets = _states(model, batch)
    head = hl.Head(model.lm_head.weight.to(torch.bfloat16))
    targets = targets.masked_fill(~batch.mask, -100)
    return hl.head_stats(hidden, head, targets, gradients=("logp",)).logp


def by_trl(cast: bool) -> Callable[[Any, Sample], Tensor]:
    """Make a function of log-probs by TRL's fused head, as in TRL's trainer."""

    def logps(model: Any, batch: Sample) -> Tensor:
        from trl.trainer.utils import add_fused_lm_head

        columns = batch.mask.shape[1]
        labels = batch.ids.masked_fill(batch.attended == 0, -100)
        labels[:, :-columns] = -100
        add_fused_lm_head(model, cast_lm_head_to_fp32=cast)
        try:
            with torch.autocast(batch.ids.device.type, torch.bfloat16):
                out = model(
                    input_ids=batch.ids, attention_mask=batch.attended, labels=labels,
                    fused_lm_head=True,
                )  # fmt: skip
        finally:
            del model.forward
        return out.log_probs[:, -columns:]

    return logps


HEADS = {"stock": by_trl(False), "cast": by_trl(True), "headloss": by_headloss}


# ---------------------------------------------------------------------- the loss and its clip


def log_ratio(work: str, new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return the float64 log-ratio of policies, [B, C], or [B, 1] for GSPO."""
    difference = torch.where(mask, new.double() - old.double(), 0.0)
    if work == "grpo":
        return difference
    return difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def beyond(work: str, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return True where the clip removes the gradient of a log-ratio."""
    low, high = CLIP[work]
    good, bad = advantages[:, None] > 0, advantages[:, None] < 0
    return (good & (ratio > math.log1p(high))) | (bad & (ratio < math.log1p(-low)))


def policy_loss(work: str, new: Tensor, old: Tensor, batch: Sample) -> Tensor:
    """Return the mean over sequences of token means (GRPO) or of sequence ratios (GSPO)."""
    low, high = CLIP[work]
    ratio = log_ratio(work, new, old, batch.mask).exp()
    advantages = batch.advantages.double()[:, None]
    values = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if work == "grpo":
        values = (values * batch.mask).sum(1) / batch.mask.sum(1)
    return values.mean()


def gradient(model: Any, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [g.double() for g in torch.autograd.grad(loss, parameters)]


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


# ---------------------------------------------------------------------- measurements


def rounded(model: Any) -> Any:
    """Return a copy of the model with head weights and hidden states in bfloat16."""
    model = copy.deepcopy(model)
    model.base_model.norm.register_forward_hook(lambda *call: call[-1].to(torch.bfloat16))
    weight = model.lm_head.weight.data
    weight.copy_(weight.to(torch.bfloat16))
    return model


def moves(model: Any, work: str, batch: Sample, rate: float, steps: int) -> Iterator[Any]:
    """Yield the model after each step (one object, changed in place)."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    old = exact(model, batch).detach()
    for _ in range(steps):
        loss = policy_loss(work, exact(model, batch), old, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield model


def compare(work: str, before: Any, after: Any, batch: Sample) -> Iterator[dict[str, Any]]:
    """Yield a row of the results for each software stack."""
    with torch.no_grad():
        old = exact(before, batch)
    new = exact(after, batch)
    truth = gradient(after, policy_loss(work, new, old, batch))
    ratio = log_ratio(work, new.detach(), old, batch.mask)
    stopped = beyond(work, ratio, batch.advantages)
    counted = batch.mask if work == "grpo" else batch.mask[:, :1]
    counted = counted & (batch.advantages != 0)[:, None]
    for stack, head in HEADS.items():
        with torch.no_grad():
            its_old = head(before, batch)
        its_new = head(after, batch)
        difference = gradient(after, policy_loss(work, its_new, its_old, batch))
        difference = [a - b for a, b in zip(difference, truth, strict=True)]
        its_ratio = log_ratio(work, its_new.detach(), its_old, batch.mask)
        wrong = beyond(work, its_ratio, batch.advantages) != stopped
        yield {
            "stack": stack,
            "wrong": float(wrong[counted].double().mean()),
            "clipped": float(stopped[counted].double().mean()),
            "error": norm(difference) / norm(truth) if any(map(torch.any, truth)) else None,
            "logp_error": float((its_new.double() - new)[batch.mask].abs().max()),
            "moved": float(ratio[counted].std()),
        }


def measured(
    path: Path, device: torch.device, rates: list[float], prompts: int, group: int
) -> Iterator[dict[str, Any]]:
    how = json.loads((path / "policy.json").read_text())
    model = spelling.load(path, device).eval()
    batch = sample(model, prompts, group)
    keep = batch.advantages != 0  # groups with equal rewards have no gradient
    parts = {name: getattr(batch, name)[keep] for name in ("ids", "attended", "mask", "advantages")}
    batch = replace(batch, **parts)
    policy = {"largest": how["largest"], "solved": how["solved"], "completions": len(batch.ids)}
    for work in CLIP:
        for rate in rates:
            for step, moved in enumerate(moves(model, work, batch, rate, max(MOVES)), 1):
                if step in MOVES:
                    rows = compare(work, rounded(model), rounded(moved), batch)
                    move = {"work": work, "rate": rate, "steps": step}
                    yield from ({**policy, **move, **row} for row in rows)


# ---------------------------------------------------------------------- table and figure


def percent(value: float | None) -> str:
    """Format a fraction in percent; None means that no gradient exists."""
    return "-" if value is None else f"{100 * value:.2g} %"


def table(results: dict[str, Any]) -> str:
    rows = results["rows"]
    heads = ("loss", "largest logit", "rate", "steps", "moved by", "clipped")
    lines = [(*heads, *(f"{n}: wrong side, error" for n in STACKS.values()))]
    lines.append(("---",) * len(heads) + ("---:",) * len(STACKS))
    for row in rows:
        if row["stack"] != "stock":
            continue
        same = [r for r in rows if all(r[k] == row[k] for k in MOVE)]
        by_stack = {r["stack"]: f"{percent(r['wrong'])}, {percent(r['error'])}" for r in same}
        lines.append((
            row["work"].upper(), f"{row['largest']:.0f}", f"{row['rate']:g}", str(row["steps"]),
            f"{row['moved']:.1e}", percent(row["clipped"]), *(by_stack[s] for s in STACKS),
        ))  # fmt: skip
    return f"{results['machine']}, commit {results['commit']}.\n\n{report.markdown(lines)}\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """For each loss, plot two quantities against the model's largest logit: the fraction of tokens
    or sequences on the wrong side of the clip, and the gradient's error."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rates = sorted({row["rate"] for row in results["rows"]})
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained", sharex=True)
    for column, (work, rate) in enumerate({"grpo": rates[-1], "gspo": rates[0]}.items()):
        for line, what in enumerate(("wrong", "error")):
            panel = panels[line, column]
            for i, stack in enumerate(STACKS):
                for steps, style in zip(MOVES, (":", "--", "-"), strict=True):
                    keys = {"work": work, "stack": stack, "steps": steps, "rate": rate}
                    rows = [r for r in results["rows"] if all(r[k] == v for k, v in keys.items())]
                    points = sorted((r["largest"], 100 * (r[what] or 0.0)) for r in rows)
                    label = f"{STACKS[stack]}, {steps} steps" if steps == 16 else None
                    panel.plot(*zip(*points, strict=True), style, color=f"C{i}", label=label)
            panel.set_title(f"{work.upper()}: {TITLES[what]}, %, rate {rate:g}", fontsize=10)
            panel.set_yscale("symlog", linthresh=0.01)
            panel.grid(alpha=0.3)
    for panel in panels[1]:
        panel.set_xlabel("largest logit")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--logits", nargs="+", type=float, default=[5, 10, 15, 20, 40],
        help="the largest, before the training that raises them",
    )  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-7, 1e-6, 1e-5])
    parser.add_argument("--models", type=Path, default=Path("runs/spelling"))
    parser.add_argument("--quick", action="store_true", help="a small model of one size of logits")
    parser.add_argument("--from", dest="read", type=Path, help="results to draw, nothing is run")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    size, prompts, group = spelling.Size(), 64, 8
    if arguments.quick:
        size, prompts, group = spelling.SMALL, 8, 4
        arguments.logits, arguments.rates = [30.0], [1e-5]
    if arguments.read is not None:
        results = json.loads(arguments.read.read_text())
    else:
        packages = (*PACKAGES, "transformers")
        results = {**about(device, arguments.commit, packages), "policies": [], "rows": []}
        for wanted in arguments.logits:
            path = spelling.saved(arguments.models, size, wanted, device)
            results["policies"].append(json.loads((path / "policy.json").read_text()))
            print({k: v for k, v in results["policies"][-1].items() if k != "size"}, flush=True)
            for row in measured(path, device, arguments.rates, prompts, group):
                results["rows"].append(row)
                print({k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()})
            if arguments.json is not None:
                write(arguments.json, json.dumps(results, indent=1) + "\n")
    if arguments.markdown is not None:
        write(arguments.markdown, table(results))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
