"""The decision whether a trainer computes log-probs over the ids that its sampler kept.

`sampling_support` is the trainer's option: True asks for log-probs over the ids that the sampler
kept, False for TRL's log-probs, None for log-probs over the ids that the sampler kept if a filter
removes ids. An option that prevents log-probs over the ids that the sampler kept raises ValueError
if `sampling_support` is True, and gives one warning if `sampling_support` is None.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..seams import release
from .support import ENGINE

LOG = logging.getLogger("headloss")
SWITCH, RUNNER = "return_sampling_mask", "VLLM_USE_V2_MODEL_RUNNER"
# Options that change the logits of the ids that the sampler keeps, and the values at which an
# option changes nothing.
CHANGING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "sequence_bias": ({}, []),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}
# `REMOVING`: Transformers' logits processors that only remove ids, each with its option and the
# value of the option that removes no id. `LEAVING`: logits processors that do not change the
# softmax. `OPTIONS`: options of logits processors that change the softmax.
REMOVING: dict[str, tuple[str, Any]] = {"MinPLogitsWarper": ("min_p", 0)}
REMOVING |= dict.fromkeys(
    (
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
    ),
    ("", None),
)
TEMPERATURE = "TemperatureLogitsWarper"
LEAVING = (TEMPERATURE, "InfNanRemoveLogitsProcessor", "LogitNormalization")
OPTIONS = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
}


class Obstacle(NamedTuple):
    """An option under which log-probs over the ids that the sampler kept are unavailable, or differ
    from the sampler's log-probs."""

    option: str
    problem: str
    # True: headloss still computes log-probs over the ids that the sampler kept, but they differ
    # from the sampler's log-probs. False: log-probs are over the whole vocabulary.
    replayed: bool = False


def wanted(trainer: Any) -> bool:
    """Return whether the trainer's options ask for log-probs over the ids that the sampler kept; an
    option that prevents such log-probs raises ValueError or gives a warning."""
    asked = trainer.sampling_support
    if asked is False or (asked is None and not _truncates(_options(trainer))):
        return False
    return settle(trainer, obstacles(trainer))


def wanted_of_processors(trainer: Any, processors: Iterable[Any], config: Any) -> bool:
    """Return whether the trainer computes log-probs over the ids that the sampler kept, given the
    logits processors that Transformers built for the generation.

    Transformers also builds logits processors from the model's own generation config.
    """
    processors = list(processors)
    if trainer.sampling_support is None and not any(map(_removes, processors)):
        return False
    return settle(trainer, [*obstacles(trainer), *_of_processors(trainer, processors, config)])


def settle(trainer: Any, obstacles: Iterable[Obstacle]) -> bool:
    """Return whether log-probs are over the ids that the sampler kept, and warn once of each option
    in `obstacles`, which makes such log-probs unavailable or different from the sampler's.

    Raises:
        ValueError: `sampling_support` is True, but an option prevents log-probs over the ids that
            the sampler kept.
    """
    replayed = True
    for option, problem, all_the_same in obstacles:
        if trainer.sampling_support:
            raise ValueError(f"{option}: is not supported beside sampling_support=True: {problem}")
        replayed &= all_the_same
        if option not in trainer.warned_of:
            trainer.warned_of.add(option)
            then = "the ids that were kept are replayed all the same"
            then = then if all_the_same else "log-probs are TRL's own, over the whole vocabulary"
            warnings.warn(f"sampling_support: {option}: {problem}; {then}", stacklevel=2)
    if replayed and trainer.sampling_support is None and trainer.args.process_index == 0:
        _announce(trainer)
    return replayed


def _announce(trainer: Any) -> None:
    """Log once per trainer that log-probs differ from TRL's, and the option that restores TRL's
    log-probs."""
    if "sampling_support" not in trainer.warned_of:
        trainer.warned_of.add("sampling_support")
        LOG.warning(
            "sampling_support: the sampler leaves ids out (top_k, top_p, min_p or another filter), "
            "so that log-probs, ratios and entropies are taken over the ids that it kept, and not "
            "over the whole vocabulary as TRL takes them; sampling_support=False takes TRL's"
        )


def obstacles(trainer: Any) -> Iterator[Obstacle]:
    """Yield the trainer's options under which log-probs over the ids that the sampler kept are
    unavailable, or differ from the sampler's log-probs."""
    options = _options(trainer)
    yield from _of_generation(trainer)
    if options["temperature"] != trainer.temperature:
        yield _temperature(options["temperature"], trainer)
    if options["top_k"] == 1:
        yield Obstacle("top_k", "with the one id that top_k=1 keeps a token has no gradient")
    elif trainer.use_vllm and not _positive(options["top_k"]):
        yield Obstacle("top_k", "vLLM returns the ids that it kept where top_k > 0 alone")
    for name, neutral in CHANGING.items():
        value = options.get(name)
        if value is not None and value not in neutral:
            yield _changes(name)
    for path in trainer.paths:
        fused = {"use_fused_loss": path.loss, "use_fused_linear_logprobs": path.logprobs}
        for name in [name for name, of in fused.items() if not of.fused][:1]:
            problem = "logits are materialised, of which the loss would say: support_ids: got them "
            yield Obstacle(name, f"{problem}beside given logits")


def _of_generation(trainer: Any) -> Iterator[Obstacle]:
    """Yield options of the trainer's token generation that prevent recording the sampler's ids."""
    if trainer.rollout_func is not None and trainer.sampling_support:
        yield Obstacle("rollout_func", "its sets are not recorded; let it return support_ids")
    if trainer.use_vllm and trainer.vllm_mode != "colocate":
        mode = f"vllm_mode={trainer.vllm_mode!r}"
        yield Obstacle("vllm_mode", f"{mode} returns no sets here, want 'colocate'")
    if trainer.use_vllm and trainer.without_sets:
        yield Obstacle("use_vllm", trainer.without_sets)
    if trainer.use_vllm:
        return
    if trainer.use_transformers_continuous_batching:
        name = "use_transformers_continuous_batching"
        yield Obstacle(name, "it has no step in which sets could be read")
    yield from _of_decoding(_options(trainer))


def _of_decoding(options: dict[str, Any]) -> Iterator[Obstacle]:
    if options.get("do_sample", True) is False:
        yield Obstacle("do_sample", "greedy decoding keeps one id, which has no gradient")
    if (options.get("num_beams") or 1) > 1:
        yield Obstacle("num_beams", "the scores of beams are no logits")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if options.get(name):
            yield Obstacle(name, "assisted decoding does not draw one token a step")


def _of_processors(trainer: Any, processors: list[Any], config: Any) -> Iterator[Obstacle]:
    named = {type(processor).__name__: processor for processor in processors}
    temperature = getattr(named.get(TEMPERATURE), "temperature", 1.0)
    yield from _of_decoding(vars(config))
    if config.do_sample and temperature != trainer.temperature:
        yield _temperature(temperature, trainer)
    for name in named:
        if name not in REMOVING and name not in LEAVING:
            yield _changes(OPTIONS.get(name, name))


def _options(trainer: Any) -> dict[str, Any]:
    """Return the sampling options; `generation_kwargs` override the trainer's."""
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
    return {name: getattr(trainer, name) for name in names} | (trainer.args.generation_kwargs or {})


def _truncates(options: dict[str, Any]) -> bool:
    top_p = options["top_p"]
    narrow = top_p is not None and top_p < 1
    return narrow or _positive(options["top_k"]) or _positive(options["min_p"])


def _positive(value: float | None) -> bool:
    return value is not None and value > 0


def _removes(processor: Any) -> bool:
    name, neutral = REMOVING.get(type(processor).__name__, (None, None))
    return name is not None and (not name or getattr(processor, name) != neutral)


def _temperature(got: float, trainer: Any) -> Obstacle:
    problem = f"tokens are drawn at {got}, log-probs are taken at {trainer.temperature}"
    return Obstacle("temperature", problem)


def _changes(option: str) -> Obstacle:
    problem = "it changes the logits of ids that are kept, which is not replayed"
    return Obstacle(option, problem, replayed=True)


# ---------------------------------------------------------------------- vLLM in this process


@contextlib.contextmanager
def engine_with_sets(trainer: Any) -> Iterator[None]:
    """Let a vLLM engine that TRL builds inside the `with` block return the ids that its sampler
    kept, if the trainer wants the ids."""
    module: Any = sys.modules.get(ENGINE)  # TRL's module that builds vLLM's engine.
    theirs = getattr(module, "LLM", None)
    if theirs is None:  # vLLM is not installed.
        yield
        return

    def build(*args: Any, **kwargs: Any) -> Any:
        if not wanted(trainer):
            return theirs(*args, **kwargs)
        chosen = RUNNER in os.environ
        if not chosen:
            os.environ[RUNNER] = "1"
        try:
            return theirs(*args, **{SWITCH: True}, **kwargs)
        except TypeError as error:
            if SWITCH not in str(error):
                raise
        if not chosen:
            del os.environ[RUNNER]
        trainer.without_sets = f"vLLM {_version()} does not know {SWITCH}, want 0.28 or later"
        wanted(trainer)  # Raises, or warns.
        return theirs(*args, **kwargs)

    module.LLM = build
    try:
        yield
    finally:
        module.LLM = theirs


def _version() -> str:
    return release("vllm") or getattr(sys.modules.get("vllm"), "__version__", "(no version)")
