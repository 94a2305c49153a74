"""headloss's plugin for Axolotl: supervised training without logits.

    plugins: [headloss.integrations.axolotl.HeadlossPlugin]
    headloss: true

The plugin applies `headloss.integrations.transformers` to the model that Axolotl has loaded, with
its adapters.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator  # type: ignore[import-not-found]

from ..losses import cross_entropy, z_loss
from .seams import announce, check_signature, part
from .shared import refuse
from .transformers import apply

BasePlugin: Any = part("axolotl", "axolotl.integrations.base", "BasePlugin")
GROUP = "axolotl.plugins"  # Entry-point group where Axolotl 0.21 and newer find plugins.
LINE = "plugins: [headloss.integrations.axolotl.HeadlossPlugin]"
# Axolotl settings that replace the loss, or compute a loss from logits.
OTHERS = ("cut_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")
OTHERS += ("chunked_cross_entropy", "use_dft", "use_eaft", "orpo_alpha", "rl", "kd_trainer")
OTHERS += ("reward_model", "process_reward_model", "label_smoothing_factor")


class HeadlossArgs(BaseModel):
    """headloss's keys in an Axolotl configuration.

    Attributes:
        headloss: whether the loss comes from headloss.
        headloss_label_smoothing: label smoothing of the cross-entropy.
        headloss_z_loss: weight of an added z-loss.
    """

    headloss: bool | None = None
    headloss_label_smoothing: float = 0.0
    headloss_z_loss: float = 0.0

    @model_validator(mode="before")
    @classmethod
    def check_headloss(cls, data: Any) -> Any:
        if data.get("headloss"):
            refuse("Axolotl without `headloss: true`", **{n: bool(data.get(n)) for n in OTHERS})
            tensors = (data.get("tensor_parallel_size") or 1) > 1
            refuse("Axolotl without `headloss: true`", tensor_parallel_size=tensors)
        return data


class HeadlossPlugin(BasePlugin):
    """Axolotl's plugin, named under `plugins:` or found by Axolotl 0.21. Without `headloss: true`
    the plugin does nothing."""

    def get_input_args(self) -> str:
        return f"{__name__}.HeadlossArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Apply headloss to the model with its adapters, before DDP, FSDP and DeepSpeed wrap the
        model.

        Raises:
            RuntimeError: Axolotl's plugins have unexpected arguments; also as from `apply`.
            ValueError, TypeError: as from `headloss.integrations.transformers.apply`.
        """
        if not cfg.headloss:
            return
        announce("axolotl", check())
        terms = cross_entropy(label_smoothing=cfg.headloss_label_smoothing or 0.0)
        apply(model, terms + cfg.headloss_z_loss * z_loss() if cfg.headloss_z_loss else terms)


def check() -> str:
    """Return a text that says what was checked, with the line that Axolotl before 0.21 needs.

    RuntimeError if Axolotl's plugins have unexpected arguments.
    """
    for name in ("get_input_args", "post_model_load"):
        theirs = part("axolotl", "axolotl.integrations.base:BasePlugin", name)
        check_signature(theirs, getattr(HeadlossPlugin, name), f"BasePlugin.{name}", "axolotl")
    base = part("axolotl", "axolotl.integrations.base")
    listed = ""
    if getattr(base, "PLUGIN_ENTRY_POINT_GROUP", None) != GROUP:
        listed = f" (it looks for no plugins by itself: {LINE} has to be in the configuration)"
    return f"the signature of BasePlugin's get_input_args and post_model_load{listed}"
