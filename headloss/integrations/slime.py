"""Log-probs and entropies for slime and miles, computed without logits.

    --custom-megatron-init-path headloss.integrations.slime.init

Actors, references and teachers return hidden states in place of logits. headloss computes log-probs
and entropies of the response tokens from the hidden states. Losses, advantages and metrics are
still computed by slime or miles. `install()` and `uninstall()` switch headloss on and off by hand.

T rows of hidden states on this rank (under tensor parallelism, on all ranks of this rank's
tensor-parallel group), H hidden width.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.batch import IGNORE
from . import megatron_mtp
from .megatron_hidden import hand_on, latest
from .seams import Seams, part, require_arguments
from .shared import holders, refuse

NAME, PROVIDER = "get_log_probs_and_entropy", "get_model_provider_func"
LOSSES = {
    "slime": "slime.backends.megatron_utils.loss",
    "miles": "miles.backends.training_utils.loss_hub.logit_processors",
}
ARGUMENTS = ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths")


def init(args: Any) -> None:
    """Set headloss up in a Megatron process, as the function for `--custom-megatron-init-path`.

    Raises:
        ValueError: a setting needs logits; the message names the setting.
        RuntimeError: as from `install`.
    """
    refuse(
        "logits, without --custom-megatron-init-path",
        custom_loss=args.loss_type == "custom_loss",
        true_on_policy_mode=bool(getattr(args, "true_on_policy_mode", False)),
    )
    if getattr(args, "mtp_num_layers", None):
        megatron_mtp.install()
    install()


def install() -> None:
    """Replace the framework's log-prob functions in every module that has them, until
    `uninstall()`.

    Models built after `install()` return hidden states.

    Raises:
        RuntimeError: neither slime nor miles is imported in this process, or a replaced function
            has unexpected arguments.
    """
    if INSTALLED:
        return
    seams = [_seams(package) for package, home in LOSSES.items() if home in sys.modules]
    if not seams:
        raise RuntimeError("slime: neither it nor miles is imported in this process")
    for one in seams:
        one.install()
        INSTALLED.append(one)


def uninstall() -> None:
    """Undo `install()`; models that slime built before `uninstall()` still return hidden states,
    not logits."""
    while INSTALLED:
        INSTALLED.pop().uninstall()


INSTALLED: list[Seams] = []


def _seams(package: str) -> Seams:
    home = LOSSES[package]
    theirs, responses = part(package, home, NAME), part(package, home, "get_responses")
    require_arguments(theirs, ARGUMENTS, NAME, package)
    require_arguments(responses, ARGUMENTS, "get_responses", package)
    module = sys.modules[home]
    provider = part(package, f"{package}.backends.megatron_utils.model_provider", PROVIDER)

    @functools.wraps(theirs, assigned=("__doc__",))
    def log_probs_and_entropy(logits: Tensor, **settings: Any) -> Any:
        values = _values(module, responses, logits, **settings)
        # slime's `get_log_probs_and_entropy` returns (empty tensor, values), miles's returns only
        # the values.
        if "top_p_token_ids" in inspect.signature(theirs).parameters:
            return torch.empty(0, device=logits.device), values
        return values

    @functools.wraps(responses)
    def get_responses(logits: Tensor, **settings: Any) -> Any:
        """Call the framework's `get_responses` for a critic's values (last dimension 1); raise
        ValueError for a larger last dimension, which would be hidden states taken for logits."""
        if logits.shape[-1] > 1:
            raise ValueError("get_responses: reads logits, of which there are none under headloss")
        return responses(logits, **settings)

    @functools.wraps(provider)
    def get_model_provider_func(args: Any, role: str = "actor") -> Any:
        build = provider(args, role)
        return build if role == "critic" else _opening(build)

    ours = {
        theirs: log_probs_and_entropy,
        responses: get_responses,
        provider: get_model_provider_func,
    }
    return Seams({at: new for old, new in ours.items() for at in holders(old)}, package)


def _opening(build: Any) -> Any:
    """Return a model provider whose models return hidden states."""

    @functools.wraps(build)
    def provide(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        hand_on(model)
        return model

    return provide


# ---------------------------------------------------------------------- log-probs


def _values(
    module: ModuleType,
    responses: Any,
    logits: Tensor,  # Hidden states [b, s / tp, H].
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool | None = None,
    non_loss_data: bool = True,
    top_p_token_ids: Any = None,
    top_p_token_offsets: Any = None,
    **layout: Any,
) -> dict[str, list[Tensor]]:
    """Return log-probs and entropies [R] of each sample's response tokens on this rank.

    `get_responses`, the function by which slime and miles choose the response tokens' rows of the
    logits, is called with row numbers in place of logits.
    """
    door, device = latest(), logits.device
    shape = (logits.shape[0], logits.shape[1] * door.ranks)
    rows = torch.arange(math.prod(shape), device=device, dtype=torch.float32).view(*shape, 1)
    lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths, **layout}
    ends = [*itertools.accumulate(map(len, unconcat_tokens), initial=0)]
    numbers = [torch.arange(*pair, device=device) for pair in itertools.pairwise(ends)]
    plain = Namespace(**{**vars(args), "rollout_temperature": 1.0})
    found = responses(rows, args=plain, unconcat_tokens=numbers, **lengths)
    pairs = [(row.flatten().long(), number[: row.shape[0]]) for row, number in found]
    at, chosen = (torch.cat(side) for side in zip(*pairs, strict=True))
    labels = torch.cat(unconcat_tokens).to(device).long()[chosen]
    targets = torch.full((math.prod(shape),), IGNORE, device=device).index_copy(0, at, labels)
    fields = {}
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        firsts = [end - count for end, count in zip(ends[1:], response_lengths, strict=True)]
        sets = zip(firsts, top_p_token_ids, top_p_token_offsets, strict=True)
        fields["support_ids"] = _support(pairs, targets, list(sets))
    heat = float(getattr(args, "rollout_temperature", 1.0))
    if entropy_requires_grad is None:
        entropy_requires_grad = getattr(args, "entropy_coef", 0.0) != 0
    # If log-probs are restricted to recorded ids, whole-vocabulary entropies need a second call.
    one = with_entropy and not fields
    names = ("logp", "entropy") if one and entropy_requires_grad else ("logp",)
    stats = door.stats(logits, targets.view(shape), heat, names, **fields)
    values = {"log_probs": stats.logp}
    if with_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(entropy_requires_grad)):
            if not one:
                stats = door.stats(logits, targets.view(shape), heat, ("entropy",))
        values["entropy"] = stats.entropy if entropy_requires_grad else stats.entropy.detach()
    counts = [len(row) for row, _ in pairs]
    split = {name: list(x.flatten()[at].split(counts)) for name, x in values.items()}
    if args.allgather_cp:
        _redistribute(module, split, rows, args, lengths)
    return split


def _redistribute(
    module: ModuleType, values: Any, rows: Tensor, args: Any, lengths: dict[str, Any]
) -> None:
    """Exchange values between context-parallel ranks, from contiguous to zigzag slices of the
    sequences, by slime's or miles's function."""
    # slime's function is named `_allgather_cp_redistribute`; miles's function has no underscore and
    # other arguments than slime's.
    if hasattr(module, "_allgather_cp_redistribute"):
        module._allgather_cp_redistribute(values, logits_local_len=rows.shape[1], **lengths)
    else:
        module.allgather_cp_redistribute(values, logits=rows, args=args, **lengths)


def _support(
    pairs: list[tuple[Tensor, Tensor]], targets: Tensor, sets: list[tuple[int, Any, Any]]
) -> tuple[Tensor, Tensor]:
    """Return the ids that the sampler kept for each token, and each token's offset, over all rows.

    A response token's set of ids holds the ids recorded by the sampler and the token itself. The
    softmax of a token without recorded ids is over the whole vocabulary.

    Args:
        pairs: for each sample, two index tensors: the rows of the logits that belong to the
            sample's tokens, and the positions of the sample's tokens in the concatenation of all
            samples.
        sets: for each sample, the index of its first response token, the ids recorded for all its
            response tokens, and the offsets of each token's ids.
    """
    keys, labels = [], targets.cpu()
    for (row, number), (first, ids, offsets) in zip(pairs, sets, strict=True):
        ends = torch.as_tensor(offsets, device="cpu").long()
        place = number.cpu() - first
        recorded = place < len(ends) - 1
        place, row = place[recorded], row.cpu()[recorded]
        begin, sizes = ends[place], ends[place + 1] - ends[place]
        before = (begin + sizes - sizes.cumsum(0)).repeat_interleave(sizes)
        inside = torch.arange(len(before), device="cpu")
        kept = torch.as_tensor(ids, device="cpu").long()[before + inside]
        keys += [(row << 32).repeat_interleave(sizes) + kept, (row << 32) + labels[row]]
    both = torch.cat(keys).unique()
    counts = torch.bincount(both >> 32, minlength=len(targets))
    ids, offsets = both & (2**32 - 1), nn.functional.pad(counts.cumsum(0), (1, 0))
    return ids.to(targets.device), offsets.to(targets.device)
