"""Random calls on two ranks: the split of a call over the ranks, and the merge of the ranks'
results.

A call is split in one of three ways: by vocabulary rows, by vocabulary rows with sequence
parallelism, or by tokens of segments that span ranks. Each rank draws the same random call from
its seed, and runs the part that belongs to the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz_versions import PLANNED, difference
from torch import Tensor, distributed
from worlds import World, skip_any_row, world_of

import headloss as hl

RANKS = 2
# time limits in seconds: for the start of the ranks, and for one call
STARTING, SECONDS = 300.0, 60.0
PLACES = ("vocabulary", "spread", "segments")
VERBS = ("head_loss", "head_stats", "head_topk")
# Terms that see only their rank's tokens, or need the order of tokens inside a segment.
WHOLE = {"clip_cov", "kl_cov", "top_entropy", "second_moment_masked", "fipo"}


def draw_place(call: Any, rng: random.Random) -> None:
    """Draw how the call is split over ranks, if it can be split.

    Tokens of a segment are not split over ranks if a term of batch scope would then see only one
    rank's tokens, or if a term needs the order of tokens.
    """
    if call.verb not in VERBS:
        return
    places = ["vocabulary", "vocabulary", "spread"] if call.verb == "head_loss" else ["vocabulary"]
    flat = isinstance(call.batch.get("support_ids"), tuple)
    names = {name for _, r in call.terms for name in (r["name"], *dict(r["modifiers"]))}
    scoped = bool(names & WHOLE)
    if call.verb == "head_loss" and not (scoped or flat):
        places += ["segments", "segments"]
    call.place = rng.choice(places)


# ---------------------------------------------------------------------- a rank's part


def cut(call: Any, rank: int) -> dict[str, Any]:
    """Reduce the arguments of a randomly drawn call to those that one rank passes.

    Return this rank's positions of hidden states and its tokens of the batch, or an empty dict if
    the rank holds all tokens.
    """
    import fuzz

    generator = torch.Generator().manual_seed(call.seed + 2)
    targets, group = call.batch["targets"], distributed.group.WORLD
    total = targets.numel()
    flat = call.hidden.reshape(total, call.hidden.shape[-1])
    if call.place == "segments":
        places = torch.randint(RANKS, (total,), generator=generator)
        segments = hl.Batch(targets, fuzz.segments_of(call)).segments
        if (places.bincount(minlength=RANKS) == segments.count).all():
            # If each rank had S tokens, a per-segment field [S] could pass for a per-token field.
            places[0] = 1 - places[0]
        tokens = (places == rank).nonzero().squeeze(1)
        call.segments = ("ids", (segments.ids.reshape(-1)[tokens], segments.count, group))

        def mine_of(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[: targets.dim()] == targets.shape:
                return value.reshape(total, *value.shape[targets.dim() :])[tokens]
            return value

        whole = {n: value for n, value in call.batch.items() if n == "prompts"}  # per segment
        call.batch = {name: mine_of(value) for name, value in call.batch.items()} | whole
        call.head["temperature"] = mine_of(call.head.get("temperature", 1.0))
        call.hidden, call.totals = flat[tokens], None if call.totals == "of" else call.totals
        return {"positions": tokens, "tokens": tokens}
    scored = call.head.get("vocab_size", len(call.head["weight"]))
    mine = _share(rank, int(torch.randint(1, scored, (), generator=generator)))
    call.head = {n: v[mine] if n in ("weight", "bias") else v for n, v in call.head.items()}
    call.head["vocab_group"] = group
    if call.lora is not None:
        a, b, scaling = call.lora
        call.lora = (a, b[mine], scaling)
    if "teacher_logits" in call.batch:
        call.batch["teacher_logits"] = call.batch["teacher_logits"][..., mine]
    if call.place == "spread":
        at = int(torch.randint(total + 1, (), generator=generator))
        positions = torch.arange(total)[_share(rank, at)]
        call.hidden = flat[positions]
        call.options["sequence_parallel"] = True
        return {"positions": positions}
    return {}


def _share(rank: int, at: int) -> slice:
    return slice(at, None) if rank else slice(at)


def ready() -> None:
    """Import the modules of a call, which takes longer than any call on a busy machine."""
    import fuzz
    import fuzz_draw

    fuzz.run(fuzz_draw.draw(0))


def run_rank(seed: int) -> dict[str, Any]:
    """Return this rank's record."""
    import fuzz
    import fuzz_draw

    call = fuzz_draw.draw(seed)
    part = cut(call, distributed.get_rank())
    return fuzz.plainly(call) | {"part": part}


# ---------------------------------------------------------------------- joined results


class Ranks:
    """Two worker ranks of this process, started by the first call and restarted after a call that
    hangs."""

    def __init__(self) -> None:
        self.open, self.world = contextlib.ExitStack(), None
        self.prepare: Callable[[], None] | None = skip_any_row
        atexit.register(self.close)

    def run(self, call: Any) -> dict[str, Any]:
        """Run a call on two ranks, and return the merged results."""
        if self.world is None:
            self.world = self.open.enter_context(world_of(RANKS, self.prepare))
            self.world.run(ready, seconds=STARTING)
        world: World = self.world
        try:
            found = world.run(run_rank, call.seed, seconds=SECONDS)
        except TimeoutError as error:
            self.close()
            return {"error": f"hang: {error}", "kind": TimeoutError}
        return joined(call, found)

    def close(self) -> None:
        self.open.close()
        self.open, self.world = contextlib.ExitStack(), None


RUNNING = Ranks()


def joined(call: Any, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the ranks' results into the results that the call would have on one rank; return an
    error if ranks disagree."""
    parts = [record.pop("part") for record in found]
    if any("error" in record for record in found):
        errors = [record.get("error", "none") for record in found]
        if len(set(errors)) == 1:
            return found[0]
        return {"error": f"ranks differ: {errors}", "kind": RuntimeError}
    gradients = [record.pop("gradients", {}) for record in found]
    shares = ("loss", "terms", "skipped") if call.place == "segments" else ()
    whole: dict[str, Any] = {}
    for name, value in found[0].items():
        values = [record[name] for record in found]
        if name in PLANNED:
            whole[name] = value
        elif name in shares:
            whole[name] = _sum(values)
        elif call.place == "segments" and name in ("logps", "entropies") and value is not None:
            whole[name] = _placed(values, [part["tokens"] for part in parts], call)
        elif not _same(values):
            return {"error": f"ranks differ: {name}: {values}", "kind": RuntimeError}
        else:
            whole[name] = value
    if "loss" in whole:
        whole["gradients"] = {
            name: _gradient(name, [given[name] for given in gradients], parts, call)
            for name in gradients[0]
        }
    return whole


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: sum(value[name] for value in values) for name in values[0]}
    return sum(values)


def _placed(values: list[Tensor], places: list[Tensor], call: Any) -> Tensor:
    shape = call.batch["targets"].shape
    whole = values[0].new_zeros(shape.numel(), *values[0].shape[1:])
    for value, place in zip(values, places, strict=True):
        whole[place] = value
    return whole.reshape(*shape, *values[0].shape[1:])


def _same(values: list[Any]) -> bool:
    return all(difference(values[0], value) == "" for value in values[1:])


def _gradient(name: str, values: list[Tensor], parts: list[dict[str, Any]], call: Any) -> Tensor:
    if name == "hidden":
        places = [part.get("positions") for part in parts]
        return values[0] if places[0] is None else _placed(values, places, call)
    if call.place == "segments":
        return sum(values[1:], values[0])
    return values[0] if name.endswith(".a") else torch.cat(values)
