"""LLaMA-Factory's `run_exp` on a tiny model gives equal runs with and without headloss's
callback.

`make test-frameworks` skips these tests: LLaMA-Factory 0.9.5 imports a class that TRL 1.16 lacks.
The tests run with LLaMA-Factory 0.9.5 and TRL 0.24.0 first on the path.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import stubbed

stubbed("llamafactory", "torchaudio")
# skip LLaMA-Factory's checks of installed package versions
os.environ["DISABLE_VERSION_CHECK"] = "1"
tuner = pytest.importorskip("llamafactory.train.tuner", exc_type=ImportError)

import headloss as hl  # noqa: E402
from headloss.integrations.transformers import HeadLossCallback  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Return a folder with a model, its tokenizer, and a data set of questions and answers."""
    import trl_case
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("llama_factory")
    AutoModelForCausalLM.from_pretrained(trl_case.llama()).save_pretrained(path / "model")
    trl_case.tokenizer().save_pretrained(path / "model")
    words = [" ".join(f"w{(7 * i + j) % 100 + 3}" for j in range(2 + i % 5)) for i in range(24)]
    rows = [
        {"instruction": words[i], "input": "", "output": words[-i - 1]} for i in range(len(words))
    ]
    (path / "rows.json").write_text(json.dumps(rows))
    (path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return path


def run(folder: Path, callbacks: list[Any], **more: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of three steps with two micro-batches, and the saved weights."""
    from safetensors.torch import load_file

    output = folder / f"run{len(list(folder.iterdir()))}"
    settings = {
        "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True,
        "finetuning_type": "full", "dataset": "rows", "dataset_dir": str(folder),
        "template": "empty", "cutoff_len": 32, "output_dir": str(output), "use_cpu": True,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
        "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant",
        "logging_steps": 1, "report_to": "none", "save_only_model": True, "max_grad_norm": 0.0,
        "overwrite_cache": True, "disable_gradient_checkpointing": True, **more,
    }  # fmt: skip
    tuner.run_exp(settings, callbacks)
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    weights = load_file(next(output.glob("*model.safetensors")))
    return [entry["loss"] for entry in history if "loss" in entry], list(weights.values())


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"finetuning_type": "lora", "lora_target": "q_proj,lm_head"},
    "packed": {"packing": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_supervised(name: str, folder: Path, monkeypatch: Any) -> None:
    """Supervised training in LLaMA-Factory gives equal losses and weights with and without
    headloss, and headloss computes no logits."""
    want, weights = run(folder, [], **SETTINGS[name])
    monkeypatch.setattr(hl.Head, "logits", lambda *_: pytest.fail("logits were made"))
    callback = HeadLossCallback()
    got, moved = run(folder, [callback], **SETTINGS[name])
    assert callback.applied is not None and callback.applied.output is not None
    assert len(want) == 3 and got == pytest.approx(want, rel=1e-5)
    for ours, theirs in zip(moved, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_loss_of_its_own_is_refused(folder: Path) -> None:
    """LLaMA-Factory's own DFT loss raises an error under headloss, since its `compute_loss_func`
    needs logits."""
    with pytest.raises(ValueError, match="compute_loss_func"):
        run(folder, [HeadLossCallback()], use_dft_loss=True)
