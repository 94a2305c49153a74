"""A replacement for vLLM's engine in TRL that generates with Transformers.

Outputs have vLLM's structure: `RequestOutput.prompt_token_ids` and `.outputs`, each with
`token_ids` and `logprobs` (for each token a dict from ids to objects with `logprob` and `rank`). As
in vLLM 0.28, an engine built with `return_sampling_mask` also has `sampling_mask.token_ids`: the
kept ids of each token, ascending. Filters run in vLLM's order: temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer


@dataclass
class SamplingParams:
    """The fields of vLLM's `SamplingParams` that TRL sets."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    structured_outputs: Any = None


@dataclass
class Mask:
    token_ids: list[list[int]]


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Any]] | None
    sampling_mask: Mask | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


def kept_scores(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return logits [V] with -inf for filtered ids."""
    z = logits.double() / params.temperature
    p = z.softmax(0)
    z = z.masked_fill(p < params.min_p * p.max(), -torch.inf)
    if params.top_k > 0:
        z = z.masked_fill(z < z.topk(min(params.top_k, len(z))).values[-1], -torch.inf)
    ordered, ids = z.sort(descending=True)
    before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
    return z.index_fill(0, ids[before >= params.top_p], -torch.inf)


class Engine:
    """A replacement for `vllm.LLM`; `built` lists all engines.

    Attributes:
        model: the generating model; TRL syncs its weights into `model`.
        masks: True if the simulated release supports `return_sampling_mask`.
        loses: index (output, token) of a token whose sampling mask the engine leaves out.
    """

    model: Any = None
    masks = True
    loses: tuple[int, int] | None = None
    built: ClassVar[list[Any]] = []

    def __init__(self, model: str, **options: Any) -> None:
        known = {"return_sampling_mask"} if self.masks else set()
        for name in {"return_sampling_mask"} & options.keys() - known:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument '{name}'")
        if options.get("return_sampling_mask"):
            assert options["logprobs_mode"] == "processed_logprobs"
            assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        self.options, self.calls = options, []  # type: ignore[var-annotated]
        self.eos = 1
        runner = SimpleNamespace(model=self)
        worker = SimpleNamespace(model_runner=runner)
        config = SimpleNamespace(max_model_len=64)
        executor = SimpleNamespace(driver_worker=worker)
        self.llm_engine = SimpleNamespace(model_config=config, model_executor=executor)
        type(self).built.append(self)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in weights:
            parameters[name].data.copy_(value)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(
        self, prompts: list[dict[str, Any]], sampling_params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        self.calls.append(sampling_params)
        if self.options.get("return_sampling_mask") and sampling_params.top_k <= 0:
            raise ValueError("return_sampling_mask needs top_k > 0")
        return [self._one(b, p["prompt_token_ids"], sampling_params) for b, p in enumerate(prompts)]

    def _one(self, at: int, prompt: list[int], params: SamplingParams) -> RequestOutput:
        tokens: list[int] = []
        logprobs, sets = [], []
        while len(tokens) < params.max_tokens and tokens[-1:] != [self.eos]:
            with torch.no_grad():
                logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            scores = kept_scores(logits, params)
            token = int(scores.softmax(0).multinomial(1))
            logp = float(scores.log_softmax(0)[token])
            logprobs.append({token: SimpleNamespace(logprob=logp, rank=1)})
            lost = self.loses == (at, len(tokens))
            sets.append([] if lost else (scores > -torch.inf).nonzero().squeeze(1).tolist())
            tokens.append(token)
        mask = Mask(sets) if self.options.get("return_sampling_mask") else None
        return RequestOutput(prompt, [CompletionOutput(tokens, logprobs, mask)])


def install(monkeypatch: pytest.MonkeyPatch, model: Any, **attributes: Any) -> list[Any]:
    """Replace vLLM in TRL by `Engine`, and return a list to which each constructed engine is
    added."""
    built: list[Any] = []
    engine = type("Engine", (Engine,), {"model": model, "built": built, **attributes})
    for module in (vllm_generation, grpo_trainer):
        if hasattr(module, "is_vllm_available"):
            monkeypatch.setattr(module, "is_vllm_available", lambda *args: True)
    monkeypatch.setattr(vllm_generation, "LLM", engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x")  # makes pytest restore the variable after the test
        monkeypatch.delenv(name)
    return built
