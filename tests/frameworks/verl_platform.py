"""A CPU platform object for verl, which supports CUDA and NPUs; import before verl's engines."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.models.transformers import monkey_patch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA


class PlatformCPU(PlatformCUDA):
    device_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def set_device(self, device_index: int) -> None:
        pass


platform_manager._current_platform = PlatformCPU()
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # The key under which verl looks up its engine class.
# Report TRL as missing, since verl would import a class that TRL 1.16 removed.
monkey_patch.is_trl_available = lambda: False
