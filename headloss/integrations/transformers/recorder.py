"""Recorder of the ids from which `generate` draws each token, and of the drawn token's log-prob.

Shapes: B rows, C generated columns, K the largest number of ids from which a token was drawn, P
(token, id) pairs of all tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...arguments import is_integers
from ...batch.support_forms import padded_pairs, pairs_of
from ...head.reading import unwrap

MODES = ("sample", "greedy_search")


@contextlib.contextmanager
def record_support(model: Any) -> Iterator[SupportRecorder]:
    """Record, inside a `with` block, the ids from which `model.generate` draws each token.

        with record_support(model) as drawn:
            tokens = model.generate(**prompts, do_sample=True, top_p=0.9)[:, prompt_length:]
        batch = hl.Batch(tokens, support_ids=drawn.support_ids, old_logps=drawn.logps(tokens), ...)

    The recorder runs as the last logits processor, after those of the model's `generation_config`
    and of a call's `logits_processor`, and leaves the scores unchanged. The recorder stores the
    ids that the sampler kept for each generated token, and the logits [B, V] of one generation step
    for B rows. If the model is on a GPU, the recorder makes the CPU wait for the GPU once per
    generation step.

    Args:
        model: a model of Transformers; PEFT, DDP and other wrappers are unwrapped.

    Yields:
        SupportRecorder: records of the last `generate` call inside the `with` block.

    Raises:
        TypeError: the model cannot generate.
        ValueError: from `generate`, for beam search and assisted decoding, which do not draw each
            token from one softmax, and for `generate_batch` (continuous batching).
    """
    recorder = SupportRecorder()
    with recorder.attached(model):
        yield recorder


@dataclass(frozen=True, eq=False)
class SampledSets:
    """For each of B rows of C tokens, the ids that the sampler kept when it drew the token.

    Attributes:
        ids: [P] int32, ascending within each token; tokens are ordered row by row.
        counts: [B, C] int32, number of ids of each token; 0: the sampler removed no id.
    """

    ids: Tensor
    counts: Tensor

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Cumulative sums of `counts` as a list: token i's recorded ids end in `ids` at index
        `_ends[i]`."""
        return self.counts.flatten().cumsum(0).tolist()

    def tokens(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the recorded ids of `count` tokens, and each token's number of ids. The tokens are
        numbered along the rows of [B, C] and begin with number `first`."""
        begin, end = (self._ends[at - 1] if at else 0 for at in (first, first + count))
        return self.ids[begin:end], self.counts.flatten()[first : first + count]


class SupportRecorder:
    """The recorder of `record_support`.

    Args:
        wanted: function of the logits processors and the generation config that returns whether to
            record; None: always.

    Attributes:
        sets: ids that the sampler kept in the last `generate`; None before a `generate` has ended.
        drawn_logps: [B, C] float32, the result of `logps`.
    """

    sets: SampledSets | None = None
    drawn_logps: Tensor

    def __init__(self, wanted: Callable[[Any, Any], bool] | None = None) -> None:
        self._wanted = wanted
        self._begin(None)

    @property
    def support_ids(self) -> Tensor:
        """Ids that the sampler kept, [B, C, K] int64, ascending and padded with -1; all -1 means
        that no id was removed.

        Greedy decoding keeps one id for each token.
        """
        sets = self._ended()
        ids = padded_pairs(sets.ids, sets.counts.flatten())
        return ids.view(*sets.counts.shape, ids.shape[1])

    def logps(self, tokens: Tensor) -> Tensor:
        """Return float32 log-probs [B, C] of the tokens, in the distributions that `generate` drew
        from.

        After a row's end, padding has log-prob -inf if the sampler had removed the padding id.

        Args:
            tokens: [B, C] integers that `generate` returned after the prompt.

        Raises:
            TypeError: `tokens` are not integers.
            ValueError: `tokens` have another shape than the tokens that `generate` drew, or differ
                from them.
        """
        shape = self._ended().counts.shape
        if not is_integers(tokens):
            raise TypeError(f"tokens: got {getattr(tokens, 'dtype', tokens)!r}, want integers")
        if tokens.shape != shape:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, want {tuple(shape)}")
        if len(others := (tokens.to(self._tokens.device) != self._tokens).nonzero()):
            b, c = others[0].tolist()
            got, want = int(tokens[b, c]), int(self._tokens[b, c])
            raise ValueError(f"tokens: got {got} at row {b}, column {c}, where {want} was drawn")
        return self.drawn_logps

    def _ended(self) -> SampledSets:
        if self.sets is None:
            raise RuntimeError("record_support: no generate has ended inside")
        return self.sets

    # ------------------------------------------------------------------ inside `generate`

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """While the `with` block runs, this recorder is the last logits processor of the model's
        `generate`."""
        model = unwrap(model)
        while hasattr(model, "get_base_model"):
            model = unwrap(model.get_base_model())
        names = "_get_logits_processor", "generate"
        if not all(hasattr(model, name) for name in names):
            raise TypeError(f"model: got {type(model).__name__}, want one that generates")
        processors, generate = (getattr(model, name) for name in names)

        @functools.wraps(processors)
        def with_recorder(*args: Any, **kwargs: Any) -> Any:
            made = processors(*args, **kwargs)
            config: Any = kwargs.get("generation_config", args[0] if args else None)
            if self._wanted is None or self._wanted(made, config):
                _check_mode(config, self._assistant, "input_ids_seq_length" in kwargs)
                self._greedy = not config.do_sample
                made.append(self)
            return made

        @functools.wraps(generate)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._begin(kwargs.get("assistant_model"))
            output = generate(*args, **kwargs)
            self._end(getattr(output, "sequences", output))
            return output

        before = {name: vars(model)[name] for name in names if name in vars(model)}
        model._get_logits_processor, model.generate = with_recorder, recorded
        try:
            yield
        finally:
            for name in names:
                delattr(model, name)
            vars(model).update(before)

    def _begin(self, assistant: Any) -> None:
        self.sets, self._assistant, self._greedy = None, assistant, False
        # For each step, the ids that the sampler kept, and their number in each row.
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._step_logps: list[Tensor] = []
        # Logits of the last sampler step, until the tokens drawn from them are known.
        self._scores: Tensor | None = None
        self._first = 0  # Length of the prompt in tokens.

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._steps:
            self._first = input_ids.shape[1]
        if input_ids.shape[1] != self._first + len(self._steps):
            raise ValueError(
                f"record_support: got a step of {input_ids.shape[1]} columns after one of "
                f"{self._first + len(self._steps) - 1}, want one more: assisted or other decoding "
                "that does not draw one token a step is not recorded"
            )
        self._look_up(input_ids)
        reached = scores
        if self._greedy:
            best = scores.argmax(1, keepdim=True)
            reached = torch.full_like(scores, -torch.inf).scatter_(1, best, 0)
        ids, counts = pairs_of(reached > -torch.inf)
        self._steps.append((ids.int(), counts.int()))
        self._scores = reached
        return scores

    def _look_up(self, sequences: Tensor) -> None:
        """Record the log-probs of the tokens in the last column of `sequences`."""
        if self._scores is not None:
            drawn = self._scores.gather(1, sequences[:, -1:].to(self._scores.device))
            self._step_logps.append((drawn.squeeze(1) - self._scores.logsumexp(1)).float())
        self._scores = None

    def _end(self, sequences: Tensor) -> None:
        """Build the set of ids from which each token of `sequences` [B, prompt + C] was drawn. If
        `generate` has discarded the token of the last step, the step is left out."""
        if not self._steps:
            return
        self._tokens = sequences[:, self._first :]
        rows, columns = self._tokens.shape
        if columns == len(self._steps):
            self._look_up(sequences)
        self.drawn_logps = torch.stack(self._step_logps[:columns], 1)
        steps, self._steps, self._step_logps, self._scores = self._steps[:columns], [], [], None
        counts = torch.stack([step[1] for step in steps])  # Shape [C, B].
        ids = torch.cat([step[0] for step in steps])
        of_row = torch.arange(rows, device=ids.device, dtype=torch.int32).repeat(columns)
        order = of_row.repeat_interleave(counts.flatten()).sort(stable=True).indices
        self.sets = SampledSets(ids[order], counts.T.contiguous())


def _check_mode(config: Any, assistant: Any, steps: bool) -> None:
    """Raise ValueError for decoding that does not draw one token from a softmax per step."""
    want = "want num_beams=1 and one token a step, sampled or greedy"
    if not steps:
        raise ValueError(f"generate_batch: continuous batching is not recorded, {want}")
    mode = str(config.get_generation_mode(assistant).value)
    if mode not in MODES:
        options = {"num_beams": config.num_beams, "prompt_lookup": config.prompt_lookup_num_tokens}
        named = ", ".join(f"{name}={value}" for name, value in options.items() if value)
        raise ValueError(f"record_support: got {mode} ({named or 'an assistant'}), {want}")
