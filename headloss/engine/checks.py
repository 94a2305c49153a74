"""Checks of a call's arguments; errors name the argument, the given value and the wanted value."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, distributed
from torch.autograd.forward_ad import unpack_dual

from ..arguments import IGNORE, check_dense, check_device, check_own_places
from ..batch.batch import LOGPS, Batch
from ..batch.packing import Packing
from ..head.dtensor import local_head
from ..head.head import Head, autocast_dtype, check_head, check_transform, transform_of
from ..kernels.transform import Transform
from ..losses.teacher import INPUTS
from ..losses.term import Objective, Term
from ..losses.trial import Reads
from ..objective.external import LossFunction
from ..objective.reads import Kinds, reads
from ..options import DEFAULT, Options
from ..private import in_forward_mode, in_function_transform


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of a public function."""

    verb: str
    tensor: Tensor  # Hidden states [.., H]; without a head, logits [.., V].
    head: Head | None = None
    batch: Batch
    terms: Term | Objective
    options: Options
    # The transform (scale, soft cap, temperature) of the head, or of logits that are an input of
    # the call.
    transform: Transform
    group: distributed.ProcessGroup | None  # Process group whose ranks hold the vocabulary shards.
    inplace: bool = False  # True if the gradient may overwrite the caller's logits.
    loss_fn: LossFunction | None = None  # An external loss function, in place of loss terms.

    @classmethod
    def of_head(
        cls,
        verb: str,
        hidden: Tensor,
        head: Head,
        batch: Batch,
        terms: Term | Objective,
        options: Options | None,
        loss_fn: LossFunction | None = None,
    ) -> Arguments:
        """Return the arguments of a call on hidden states; ValueError or TypeError for a head
        that has no rows on this rank."""
        check_head(head)
        head = local_head(head)
        return cls(
            verb=verb,
            tensor=hidden,
            head=head,
            batch=batch,
            terms=terms,
            loss_fn=loss_fn,
            options=DEFAULT if options is None else options,
            transform=transform_of(head),
            group=head.vocab_group,
        )


def check_eager(verb: str, tensor: object = None, *others: object) -> None:
    """Raise an error if the public function named `verb` cannot handle the call: RuntimeError
    inside a transform of torch.func, NotImplementedError for a dual tensor (forward-mode AD),
    ValueError for a tensor on the meta device."""
    if torch.compiler.is_compiling():
        return
    if in_function_transform():
        raise RuntimeError(
            f"headloss.{verb}: got called inside a transform of torch.func (grad, vmap, jvp, ...), "
            "want a plain call: take gradients with backward() or torch.autograd.grad, and make "
            "vmap's dimension one of the tokens'"
        )
    if isinstance(tensor, Tensor) and tensor.is_meta:
        raise ValueError(
            f"headloss.{verb}: got a tensor of shape {tuple(tensor.shape)} on the meta device, "
            "want one with values; headloss.plan takes hidden states and a head without"
        )
    tensors = (value for value in (tensor, *others) if isinstance(value, Tensor))
    if in_forward_mode() and any(unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            f"headloss.{verb}: got a dual tensor, want a plain one: there is no forward mode"
        )


def check_linear(arguments: Arguments, objective: Objective) -> torch.dtype | None:
    """Check hidden states and head; return autocast's dtype."""
    hidden = arguments.tensor
    head = arguments.head
    options = arguments.options
    batch = arguments.batch
    assert head is not None
    if objective.scope == "external" and options.upstream is not None:
        raise ValueError(
            f"upstream: got {options.upstream}, want None: statistics have an upstream gradient "
            "per token, which is not known in advance"
        )
    grouped = head.vocab_group is not None
    if options.sequence_parallel and not grouped:
        raise ValueError("sequence_parallel: needs a head with a vocab_group")
    if options.sequence_parallel and head.beside:
        raise ValueError("sequence_parallel: got a head with columns beside, want a head without")
    compute_dtype = autocast_dtype(hidden)
    head.validate(hidden, token_shape=batch.targets.shape, compute_dtype=compute_dtype)
    weight = head.weight
    grad = options.main_grad
    if grad is not None and (
        grad.shape != weight.shape
        or grad.dtype != torch.float32
        or grad.device != weight.device
        or grad.requires_grad  # `main_grad` must not require a gradient.
    ):
        raise ValueError(
            f"main_grad: got {grad.dtype} {tuple(grad.shape)} on {grad.device}, want torch.float32 "
            f"{tuple(weight.shape)} on {weight.device} that requires no gradient"
        )
    if grad is not None and torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError("main_grad: got a tensor, but the weight requires no gradient; want None")
    if batch.support is not None and objective.teachers:
        raise ValueError(
            f"support_ids: got them with {objective!r}, whose teachers have the whole vocabulary; "
            "want terms without distillation"
        )
    for teacher in objective.teachers if grouped else ():
        other = teacher.head and local_head(teacher.head)
        if other and other.vocab_group is not None:
            got, want = ((h.weight.shape[0], h.vocab_size) for h in (other, head))
            if got != want or other.vocab_group is not head.vocab_group:
                raise ValueError(
                    f"teacher_head: got (rows, vocab_size) {got}, want the student's {want} and "
                    "its vocab_group, or the teacher's whole head"
                )
    return compute_dtype


def check_given(arguments: Arguments) -> None:
    """Check logits that are an input of the call, and the options that apply to such logits."""
    logits = arguments.tensor
    options = arguments.options
    transform = arguments.transform
    inplace = arguments.inplace
    temperature = transform.temperature
    if arguments.batch.support is not None:
        raise ValueError(
            "support_ids: got them beside given logits, want head_loss, or the logits masked"
        )
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = f"a {logits.dtype} tensor" if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits: got {got}, want a floating tensor")
    check_dense("logits", logits)
    check_transform(temperature, transform.softcap, transform.scale)
    if isinstance(temperature, Tensor):
        check_device("temperature", temperature, logits, "that of logits,")
    if options.main_grad is not None:
        raise ValueError("main_grad: got a tensor, but given logits have no weight")
    if options.sequence_parallel:
        raise ValueError("sequence_parallel: got logits, want hidden states before a head")
    if options.gradient_tolerance:
        raise ValueError(
            f"gradient_tolerance: got {options.gradient_tolerance}, want 0: given logits have no "
            "products that leaving rows out would save"
        )
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace: got {inplace!r}, want True or False")
    if inplace:
        check_own_places("inplace", logits, "logits")


def check_objective(objective: Objective, batch: Batch, options: Options) -> None:
    """Check the loss terms together with the batch and the options."""
    if not objective.parts:
        raise ValueError("objective: got no terms, want at least one")
    # If the check of targets failed on this rank, `batch` holds the exception; raise the exception
    # here, where errors reach all ranks.
    if isinstance(batch, Exception):
        raise batch
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: got {type(batch).__name__}, want headloss.Batch")
    check_options(options)
    check_segments(batch.segments.count, objective)
    if options.gradient_tolerance and objective.teachers:
        raise ValueError(
            f"gradient_tolerance: got {options.gradient_tolerance} with {objective!r}, want 0: a "
            "divergence's gradient has no bound that is known before it is computed"
        )


def check_options(options: object) -> None:
    if not isinstance(options, Options):
        raise TypeError(f"options: got {type(options).__name__}, want headloss.Options")


def check_per_token(names: Sequence[str], traced: Mapping[str, Reads]) -> None:
    """ValueError for a name in `per_token` that no term reports; an external loss reports no
    names."""
    if names and "external_loss" in traced:
        raise ValueError(f"per_token: got {names!r}, want (): the loss is no term of the library")
    reported = {f"{term}/{name}" for term, of in traced.items() for name in of.observed}
    for name in set(names) - reported - {"top1"}:
        raise ValueError(f'per_token: got {name!r}, want names out of "top1", {sorted(reported)}')


def check_segments(count: int, objective: Objective) -> None:
    """ValueError if the number of segments is not a multiple of the number that a loss term needs
    at once, such as 2 for pairs of segments."""
    if count % (unit := objective.segments_per_unit):
        raise ValueError(f"segments: got {count}, want a multiple of {unit} for {objective!r}")


def check_targets(targets: object, hidden: object, options: Options) -> Batch:
    """Return a batch that has only targets, whose shape is checked against the hidden states; the
    hidden states are checked later."""
    check_options(options)
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"targets: got {type(targets).__name__}, want an int64 tensor [..] or a headloss.Batch"
        )
    batch = Batch(targets)
    if isinstance(hidden, Tensor) and hidden.is_floating_point() and not hidden.is_nested:
        check_device("targets", targets, hidden, "that of hidden,")
        got = tuple(targets.shape)
        want = tuple(hidden.shape[:-1])
        if got != want and not options.sequence_parallel:
            raise ValueError(f"targets: got shape {got}, want hidden's {want}")
    return batch


# ---------------------------------------------------------------------- fields and terms

_NAMES = "advantages teacher_logps candidate_ids candidate_probs candidate_sampling_logps desirable"
_NAMES += " reference_kl importance_sampling_ratio prompts slots teacher_index teacher_lse"
FIELDS = frozenset({*_NAMES.split(), *LOGPS, *sum(INPUTS.values(), ())})
# Names that other libraries give to masks, each with the mask's value at excluded tokens. A batch
# field is also taken for a mask if the field's name contains "mask".
_ZERO = "mask attention_mask loss_mask completion_mask response_mask action_mask assistant_mask"
_ZERO += " assistant_masks weight weights loss_weights sample_weight"
MASKS = {**dict.fromkeys(_ZERO.split(), 0), "labels": IGNORE}


def check_masks(batch: Batch, read: set[str], scored: Packing, dtype: torch.dtype) -> None:
    """Raise ValueError for a batch field that looks like an unused mask: the field has a mask's
    name, has the mask's value for excluded tokens at a scored token, and is read by no term of this
    call or of an earlier call. Each batch field whose name is that of a mask, such as `loss_mask`,
    costs one read of a GPU value by the CPU."""
    names = {n for n in batch.fields if n in MASKS or "mask" in n.lower()}
    batch._masks_read |= names & read
    for name in names - batch._masks_read:
        value = getattr(scored.view(batch, dtype), name)
        out = value == (left_out := MASKS.get(name, 0))
        if value.dim() == 1 and out.any():
            token = int(out.nonzero()[0])
            position = token if scored.index is None else int(scored.index[token])
            raise ValueError(
                f"{name}: got {left_out} at position {position}, which is scored, as no term "
                f"reads {name}; to leave it out want a target of -100 there, or a term that reads "
                f'it: .where("{name}") of a boolean field, .weighted("{name}") of any'
            )


def warn_of_misspelt_fields(batch: Batch, read: set[str]) -> None:
    """Warn of a field that no term reads, if the field's name is close to a known name."""
    unread = batch.fields.keys() - read - FIELDS
    if not unread:
        return
    absent = {name.lower(): name for name in FIELDS | read if name not in batch.fields}
    for name in unread:
        close = difflib.get_close_matches(name.lower(), absent, n=1, cutoff=0.8)
        if close:
            warnings.warn(
                f"{name}: is a field of the batch that no term reads; is it meant to be "
                f"{absent[close[0]]}?",
                stacklevel=2,
            )


def check_dead_rows(
    objective: Objective, kinds: Kinds, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError if a part of a term has scope="batch" and does not read `batch.live`, the
    mask of scored tokens: with static shapes the batch also contains unscored positions, which the
    part would count as tokens."""
    for name, _, term in objective.named():
        if term.scope != "batch":
            continue
        alone = replace(
            term, function=lambda stats, _: stats.logp, per="token", weight_fields=(), observe=None
        )
        parts = [replace(term, modifiers=())] * ((term.own_scope or term.scope) == "batch")
        parts += [replace(alone, modifiers=(m,)) for m in term.modifiers if m.scope == "batch"]
        traced = [reads(Objective.of(part), kinds, dtype, device, observe=False) for part in parts]
        if any("live" not in of.fields for part in traced for of in part.values()):
            raise ValueError(
                f"static: got True with term {name}, whose scope is batch, want False: it would "
                "see unscored rows (batch.live, which it does not read, marks the others)"
            )


def check_temperatures(rows: Tensor, index: Tensor | None) -> None:
    """ValueError if one of the temperatures [T] is not a finite number > 0. The error text names a
    token t by its position `index[t]`, or by t if `index` is None. Reads the device."""
    bad = ~((rows > 0) & rows.isfinite())
    if not rows.is_meta and bad.any():
        token = int(bad.nonzero()[0])
        position = token if index is None else int(index[token])
        raise ValueError(
            f"temperature: got {rows[token].item()} at position {position}, want a finite "
            "number > 0"
        )
