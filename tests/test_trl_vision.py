"""Vision-language models in headloss's trainers agree with TRL's step by step."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trl
import trl_case
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from headloss import rl
from headloss.integrations import trl as ours

IMAGE = "w119"  # placeholder token of image patches
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }} {% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}" + IMAGE + " {% else %}"
    "{{ c['text'] }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@functools.cache
def model() -> str:
    text = {"model_type": "llama", **trl_case.SIZES}
    eyes = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
        "projection_dim": 16,
    }  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=eyes, image_token_index=119, image_seq_length=4,
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(std=0.3)
    path = str(Path(trl_case.folder()) / "llava")
    made.save_pretrained(path)
    return path


def load() -> Any:
    return AutoModelForImageTextToText.from_pretrained(model(), dtype=torch.float32)


def processor() -> Any:
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    tokenizer = copy.deepcopy(trl_case.tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    return LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default",
        chat_template=TEMPLATE, image_token=IMAGE, num_additional_image_tokens=1,
    )  # fmt: skip


def picture(i: int) -> Any:
    pixels = torch.randint(0, 255, (8, 8, 3), generator=torch.Generator().manual_seed(i))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def turns(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rows(kind: str) -> Dataset:
    found = []
    for i in range(8):
        question, answer = turns("user", f"w{i + 5} w{i + 9}"), turns("assistant", f"w{i} w{2 * i}")
        row: dict[str, Any] = {"prompt": question, "images": [picture(i)]}
        if kind == "SFTTrainer":
            row["completion"] = answer
        if kind == "DPOTrainer":
            row |= {"chosen": answer, "rejected": turns("assistant", f"w{3 * i + 4} w7 w{i + 1}")}
        found.append(row)
    return Dataset.from_list(found)


def trainer(kind: str, owner: Any, folder: Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        **trl_case.ARGUMENTS, "output_dir": str(folder), "max_steps": 2, "learning_rate": 0.05,
        "per_device_train_batch_size": 4, **more,
    }  # fmt: skip
    others: dict[str, Any] = {}
    made = getattr(owner, kind)
    if kind == "GRPOTrainer":
        settings |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        others["reward_funcs"] = trl_case.reward

        class Given(made):
            def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                ids = trl_case.sampled(1, len(prompt_ids), seed=self.state.global_step)[0]
                return [[min(i, 118) for i in row] for row in ids], None  # without image tokens

        made = Given
    else:
        settings["max_length"] = None
    if kind != "GRPOTrainer":
        settings.pop("shuffle_dataset", None)
    config = getattr(trl, kind.replace("Trainer", "Config"))(**settings)
    return made(
        model=load(), args=config, train_dataset=rows(kind), processing_class=processor(), **others
    )


@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer", "GRPOTrainer"])
def test_with_images(kind: str, tmp_path: Path) -> None:
    trl_case.assert_same_run(trainer(kind, trl, tmp_path), trainer(kind, ours, tmp_path))


@pytest.mark.parametrize("kind", ["PPO", "REINFORCE"])
def test_rewards_per_token_are_refused(kind: str, tmp_path: Path) -> None:
    config = getattr(rl, f"{kind}Config")(**{**trl_case.ARGUMENTS, "output_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="multimodal_inputs: is not supported .* use GRPO, GSPO"):
        getattr(rl, kind)(
            model=load(), reward_funcs=trl_case.reward, args=config,
            train_dataset=rows("GRPOTrainer"), processing_class=processor(),
        )  # fmt: skip
