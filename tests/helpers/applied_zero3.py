"""Script for two processes: training after `apply(model)` under DeepSpeed's ZeRO-3 agrees with
unsharded training."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import applied_ranks  # noqa: E402
import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import distributed  # noqa: E402

from headloss.integrations.transformers import apply  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
}


def trains(adapters: bool) -> None:
    alone = applied_ranks.causal(adapters).float()
    model: Any = copy.deepcopy(alone)
    for each in (alone, model):
        apply(each, applied_ranks.TERMS)
    chosen = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(chosen, 0.1), config=CONFIG
    )[0]
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    rank = distributed.get_rank()
    for index in range(applied_ranks.STEPS):
        ids = applied_ranks.rows(rank, index)
        with torch.no_grad():
            want = alone(input_ids=ids, labels=ids).loss
        applied_ranks.step(alone, optimizer, [0, 1], index)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        torch.testing.assert_close(loss.detach(), want, rtol=1e-5, atol=1e-6)
    trained = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            torch.testing.assert_close(parameter.data, trained[name].data, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    import headloss.integrations.transformers.call as call

    def no_real_logits(*_: Any, **__: Any) -> Any:
        raise AssertionError("the loss had real logits")

    call.logits_loss = no_real_logits
    deepspeed.init_distributed("gloo")
    for with_adapters in (False, True):
        trains(with_adapters)
        sys.stdout.write(f"\nadapters {with_adapters}: well on rank {distributed.get_rank()}\n")
    distributed.destroy_process_group()
