"""ms-swift's `sft_main` on a tiny model gives equal runs with and without headloss's callback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

swift = pytest.importorskip("swift.pipelines", exc_type=ImportError)

import headloss as hl  # noqa: E402
from headloss.integrations.ms_swift import register  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Return a folder with a model, its tokenizer, questions and answers, and a plugin that
    registers headloss."""
    import trl_case
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("ms_swift")
    AutoModelForCausalLM.from_pretrained(trl_case.llama()).save_pretrained(path / "model")
    trl_case.tokenizer().save_pretrained(path / "model")
    words = [" ".join(f"w{(7 * i + j) % 100 + 3}" for j in range(2 + i % 5)) for i in range(24)]
    rows = [{"query": words[i], "response": words[-i - 1]} for i in range(len(words))]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "plugin.py").write_text(
        "from headloss.integrations.ms_swift import register\nregister()\n"
    )
    return path


def run(folder: Path, *more: str) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Return logs of three steps with two micro-batches and of an evaluation, and the weights."""
    from safetensors.torch import load_file

    output = folder / f"run{len(list(folder.iterdir()))}"
    settings = {
        "model": folder / "model", "model_type": "llama", "template": "default",
        "tuner_type": "full", "dataset": folder / "rows.jsonl", "max_length": 32,
        "output_dir": output, "use_cpu": "true", "torch_dtype": "float32", "max_steps": 3,
        "gradient_accumulation_steps": 2, "learning_rate": 0.1, "optim": "sgd",
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none",
        "max_grad_norm": 0.0, "gradient_checkpointing": "false", "add_version": "false",
        "split_dataset_ratio": 0.2, "eval_steps": 3, "save_steps": 3, "load_from_cache_file":
        "false", "check_model": "false", "dataset_num_proc": 1, "dataloader_num_workers": 0,
    }  # fmt: skip
    named = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    swift.sft_main([*named, *more])
    saved = next(output.rglob("checkpoint-3"))
    logs = json.loads((saved / "trainer_state.json").read_text())["log_history"]
    return logs, list(load_file(next(saved.glob("*model.safetensors"))).values())


SETTINGS: dict[str, list[str]] = {
    "rows of one": ["--per_device_train_batch_size", "1"],
    "rows of three": ["--per_device_train_batch_size", "3"],
    "lora": ["--tuner_type", "lora", "--target_modules", "q_proj", "v_proj"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_supervised(name: str, folder: Path, monkeypatch: Any) -> None:
    """Supervised training by `sft_main` gives equal logs and weights with and without headloss, and
    headloss computes no logits."""
    want, weights = run(folder, *SETTINGS[name])
    monkeypatch.setattr(hl.Head, "logits", lambda *_: pytest.fail("logits were made"))
    ours = ("--external_plugins", str(folder / "plugin.py"), "--callbacks", "headloss")
    got, moved = run(folder, *SETTINGS[name], *ours)
    assert len(want) == len(got) >= 4
    for theirs, mine in zip(want, got, strict=True):
        assert theirs.keys() == mine.keys()
        shared = [n for n in theirs if n.endswith(("loss", "acc", "grad_norm"))]
        assert shared
        for key in shared:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    for mine, theirs in zip(moved, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_unsupported_settings_are_refused_by_name(folder: Path) -> None:
    register()
    with pytest.raises(ValueError, match="enable_dft_loss: is not supported here, only by ms"):
        run(folder, "--callbacks", "headloss", "--enable_dft_loss", "true")
    with pytest.raises(ValueError, match="terms: got a term that is no mean of all scored tokens"):
        register(hl.cross_entropy().over("sequence_mean"))
