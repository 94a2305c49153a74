"""No tensor of a call is larger than the planned chunk of logits, and no unneeded tensor is made.

T tokens, H hidden width, V vocabulary. All tensors created by operators are recorded.
"""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from live_tensors import LiveTensors

import headloss as hl
from headloss.engine import plan
from headloss.head import products
from headloss.kernels.interface import Forward
from headloss.kernels.reference import tile as reference
from headloss.kernels.transform import Transform
from headloss.logits.linear import LinearLogits
from headloss.testing import trained_looking

T, H, V, CHUNK = 128, 12, 512, 16
BLOCK = 4  # rows of a block in which the reference backend computes
FLOAT = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let the reference backend work in blocks that are small compared with a chunk."""
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", BLOCK * V)
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", BLOCK * V)


def problem(dtype=torch.float32, hidden_gradient=True, weight_gradient=True):
    hidden, weight, targets = trained_looking(T, H, V, dtype)
    targets[::7] = -100
    batch = hl.Batch(
        targets,
        hl.Segments.from_lengths([T // 32] * 32),
        advantages=torch.randn(32),
        old_logps=-torch.rand(T),
        ref_logps=-torch.rand(T),
    )
    hidden.requires_grad_(hidden_gradient), weight.requires_grad_(weight_gradient)
    return hidden, hl.Head(weight), batch


def measured(hidden, head, batch, objective, options) -> tuple[LiveTensors, hl.Plan]:
    with LiveTensors() as live:
        out = hl.head_loss(hidden, head, batch, objective, options)
        if out.loss.requires_grad:
            out.loss.backward()
    return live, out.plan


OBJECTIVES = {
    "token": hl.grpo() + hl.kl(estimator="k3") - 1e-3 * hl.entropy() + 1e-4 * hl.z_loss(),
    "segment": hl.gspo() + hl.dpo() - 1e-3 * hl.entropy(),
    "batch": hl.grpo().top_entropy(quantile=0.2) + hl.cross_entropy(label_smoothing=0.1),
}


# ---------------------------------------------------------------------- the largest tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("schedule", "scope"),  # `one_pass` with scope "batch" is left out: it is a single chunk
    [
        *((s, o) for s in ("one_pass", "recompute") for o in ("token", "segment")),
        ("recompute", "batch"),
    ],
)
def test_no_tensor_is_larger_than_a_chunk_of_logits(schedule, scope, dtype):
    hidden, head, batch = problem(dtype)
    options = hl.Options(schedule=schedule, chunk_tokens=CHUNK)
    live, plan = measured(hidden, head, batch, OBJECTIVES[scope], options)
    assert plan.schedule == schedule and plan.chunk_tokens <= CHUNK
    assert plan.chunk_tokens <= T // 8
    assert live.largest <= max(plan.chunk_tokens * V, V * H)  # dW


def test_blocks_share_their_temporaries(monkeypatch):
    """The reference backend reuses one temporary tensor for all blocks of rows, so that memory
    does not grow with the number of blocks."""
    tiles, exp = [], torch.exp
    monkeypatch.setattr(torch, "exp", lambda x, out: tiles.append(exp(x, out=out)) or tiles[-1])
    raw, forward = torch.randn(3 * BLOCK - 1, V), Forward(None, 0, Transform(), frozenset())
    reference.partials(raw, forward)
    assert [len(tile) for tile in tiles] == [BLOCK, BLOCK, BLOCK - 1]
    assert len({tile.data_ptr() for tile in tiles}) == 1


@pytest.mark.parametrize("scope", OBJECTIVES)
def test_auto_under_a_budget(scope):
    hidden, head, batch = problem()
    options = hl.Options(memory_budget=CHUNK * V * FLOAT)
    live, plan = measured(hidden, head, batch, OBJECTIVES[scope], options)
    assert plan.schedule == ("recompute" if scope == "batch" else "one_pass")
    assert plan.chunk_tokens <= CHUNK
    assert live.largest <= max(plan.chunk_tokens * V, V * H)


def test_a_frozen_head():
    """With a frozen head no tensor has the size of the weight."""
    hidden, head, batch = problem(weight_gradient=False)
    objective = hl.gspo() + hl.kl(estimator="k3")
    options = hl.Options(schedule="frozen", chunk_tokens=8)
    live, plan = measured(hidden, head, batch, objective, options)
    assert plan.schedule == "frozen"
    assert live.largest <= max(plan.chunk_tokens * V, T * H) < V * H


def test_statistics_alone():
    hidden, head, batch = problem(hidden_gradient=False, weight_gradient=False)
    for objective in OBJECTIVES.values():
        live, plan = measured(hidden, head, batch, objective, hl.Options(chunk_tokens=8))
        assert plan.schedule == "statistics"
        assert live.largest <= max(plan.chunk_tokens * V, T * H) < V * H


def test_head_stats():
    hidden, head, batch = problem()
    with LiveTensors() as live:
        found = hl.head_stats(hidden, head, batch.targets)
        (found.logp.sum() + found.entropy.square().sum() + found.lse.sum()).backward()
    # `head_stats` plans its memory itself; with few tokens it keeps the logits of all tokens, T x
    # V numbers.
    assert live.largest <= T * V
    assert live.peak <= 1.5 * T * V * FLOAT


def test_head_stats_in_tiles(monkeypatch):
    # A budget of CHUNK rows of logits on CPUs.
    monkeypatch.setattr(plan, "CPU_BUDGET", CHUNK * V * FLOAT)
    hl.clear_cache()  # forgets plans
    hidden, head, batch = problem()
    with LiveTensors() as live:
        found = hl.head_stats(hidden, head, batch.targets)
        (found.logp.sum() + found.entropy.square().sum() + found.lse.sum()).backward()
    hl.clear_cache()
    assert live.largest <= max(CHUNK * V, V * H)


def test_head_topk():
    hidden, head, _ = problem()
    with LiveTensors() as live:
        hl.head_topk(hidden, head, 5, hl.Options(chunk_tokens=CHUNK))
    assert live.largest <= CHUNK * V
    assert live.peak <= 5 * CHUNK * V * FLOAT


@pytest.mark.parametrize("k", [1, 3])
def test_head_topk_holds_one_tile_of_logits_at_a_time(k, monkeypatch):
    """`head_topk` frees a tile of logits before the next tile is computed."""
    raw, tiles, alive = LinearLogits.raw, [], []

    def recorded(self, *where):
        alive.append(sum(tile() is not None for tile in tiles))
        tiles.append(weakref.ref(logits := raw(self, *where)))
        return logits

    monkeypatch.setattr(LinearLogits, "raw", recorded)
    head = hl.Head(torch.randn(4096, 8))
    hl.head_topk(torch.randn(64, 8), head, k, hl.Options(memory_budget=1 << 18))
    assert alive == [0] * len(alive) and len(alive) > 3


# ---------------------------------------------------------------------- the peak


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_the_peak_against_plain_logits(schedule):
    hidden, head, batch = problem()
    options = hl.Options(schedule=schedule, chunk_tokens=CHUNK, metrics=False)
    live, _ = measured(hidden, head, batch, hl.cross_entropy(), options)
    leaf, weight = (t.detach().requires_grad_() for t in (hidden, head.weight))
    with LiveTensors() as eager:
        F.cross_entropy(leaf @ weight.T, batch.targets).backward()
    returned = (T * H + V * H) * FLOAT
    assert eager.peak >= 2 * T * V * FLOAT
    assert live.peak - returned < eager.peak / 10


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "frozen", "held"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_the_plans(schedule, dtype):
    """The measured peak of memory is at most 1.3 times the bytes of the plan, plus the reference
    backend's temporary blocks of logits."""
    hidden, head, batch = problem(dtype, weight_gradient=schedule != "frozen")
    objective = hl.grpo() + hl.kl() if schedule == "frozen" else OBJECTIVES["token"]
    for chunk in (16, 128):
        hidden.grad = head.weight.grad = None
        options = hl.Options(schedule=schedule, chunk_tokens=chunk, metrics=False)
        live, plan = measured(hidden, head, batch, objective, options)
        returned = T * H * dtype.itemsize
        if schedule != "frozen":
            returned += V * H * dtype.itemsize
        # scored rows are copied, since one in seven tokens is unscored
        inputs = T * H * dtype.itemsize
        blocks = 6 * BLOCK * V * FLOAT
        vectors = T * 64
        assert live.peak <= 1.3 * (plan.total_bytes + returned + inputs) + blocks + vectors
        assert live.peak >= plan.bytes["logits"]


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_four_times_the_tokens_add_numbers_and_rows_of_hidden_width(schedule):
    """Per additional token, a call needs at most 64 numbers and 4 float32 rows of hidden width,
    less than a row of V = 512 logits."""
    options = hl.Options(schedule=schedule, memory_budget=CHUNK * V * FLOAT)

    def peak(times: int) -> int:
        hidden, weight, targets = trained_looking(times * T, H, V, torch.bfloat16)
        head = hl.Head(weight.requires_grad_())
        batch = hl.Batch(targets)
        live, _ = measured(hidden.requires_grad_(), head, batch, hl.cross_entropy(), options)
        return live.peak

    assert peak(4) - peak(1) <= 3 * T * (64 + 4 * H) * FLOAT < 3 * T * V * FLOAT / 2


@pytest.mark.parametrize(
    ("schedule", "tokens", "vocabulary", "support"),
    [("one_pass", 512, 16, False), ("recompute", 8, 1024, False), ("recompute", 8, 1024, True)],
)
def test_a_product_that_is_a_gradient_has_no_copy(schedule, tokens, vocabulary, support):
    """A matmul whose result is a whole gradient writes it without a further copy: the hidden
    gradient of many tokens, or the weight gradient of a large vocabulary.

    With `support_ids`, the reference backend computes a matmul into new memory and then moves it,
    which costs one copy.
    """
    hidden, weight, targets = trained_looking(tokens, 64, vocabulary)
    batch = hl.Batch(targets, support_ids=targets.unsqueeze(1) if support else None)
    head = hl.Head(weight.requires_grad_())
    options = hl.Options(schedule=schedule, metrics=False)
    live, _ = measured(hidden.requires_grad_(), head, batch, hl.cross_entropy(), options)
    returned = (hidden.numel() + weight.numel()) * FLOAT
    assert live.peak <= (1.5 + support) * returned


def test_memory_does_not_grow_with_the_number_of_terms():
    hidden, head, batch = problem()
    options = hl.Options(chunk_tokens=CHUNK)
    one, _ = measured(hidden, head, batch, hl.grpo(), options)
    hidden.grad = head.weight.grad = None
    many = OBJECTIVES["token"] + hl.cross_entropy() + hl.reinforce() + hl.sapo() + hl.cispo()
    all_of_them, _ = measured(hidden, head, batch, many, options)
    assert all_of_them.peak <= one.peak + 64 * T * FLOAT
    assert all_of_them.largest == one.largest


def test_nothing_is_left_behind():
    """After the backward pass only gradients and outputs are alive."""
    hidden, head, batch = problem()
    for schedule in ("one_pass", "recompute"):
        hidden.grad = head.weight.grad = None
        with LiveTensors() as live:
            out = hl.head_loss(
                hidden, head, batch, OBJECTIVES["token"], hl.Options(schedule=schedule)
            )
            out.loss.backward()
        returned = (T * H + V * H) * FLOAT
        assert live.live <= returned + 64 * T * FLOAT
        del out


# ---------------------------------------------------------------------- only what is needed


@pytest.fixture
def products_run(monkeypatch) -> dict[str, int]:
    """Count how often each of the three large matmuls runs."""
    count = {"logits": 0, "input_gradient": 0, "weight_gradient": 0}

    def counted(home, name):
        inner = getattr(home, name)

        def spy(*args, **options):
            count[name.removeprefix("add_").removesuffix("_")] += 1
            return inner(*args, **options)

        return spy

    for name in ("logits", "input_gradient", "add_input_gradient_", "add_weight_gradient_"):
        home = products if "weight" in name else products.PLAIN
        monkeypatch.setattr(home, name, counted(home, name))
    return count


@pytest.mark.parametrize(
    ("hidden_gradient", "weight_gradient"),
    [(True, True), (True, False), (False, True), (False, False)],
)
@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "auto"])
def test_only_what_requires_a_gradient_is_computed(
    products_run, schedule, hidden_gradient, weight_gradient
):
    hidden, head, batch = problem(hidden_gradient=hidden_gradient, weight_gradient=weight_gradient)
    options = hl.Options(schedule=schedule, chunk_tokens=CHUNK)
    measured(hidden, head, batch, OBJECTIVES["token"], options)
    assert bool(products_run["input_gradient"]) == hidden_gradient
    assert bool(products_run["weight_gradient"]) == weight_gradient
    assert (hidden.grad is not None) == hidden_gradient
    assert (head.weight.grad is not None) == weight_gradient


def test_eval_runs_the_logits_product_alone(products_run):
    hidden, head, batch = problem()
    with torch.no_grad():
        out = hl.head_loss(hidden, head, batch, OBJECTIVES["segment"])
    assert out.plan.schedule == "statistics" and not out.loss.requires_grad
    assert products_run["input_gradient"] == products_run["weight_gradient"] == 0


SWEEPS = [("one_pass", 1), ("frozen", 1), ("held", 1), ("recompute", 2)]


@pytest.mark.parametrize(("schedule", "sweeps"), SWEEPS)
def test_the_number_of_products(products_run, schedule, sweeps):
    """Each schedule runs its number of large matmuls: logits once (twice under `recompute`), one
    input gradient, and one weight gradient unless the head is frozen."""
    hidden, head, batch = problem(weight_gradient=schedule != "frozen")
    options = hl.Options(schedule=schedule, chunk_tokens=T)
    measured(hidden, head, batch, hl.grpo(), options)
    assert products_run["logits"] == sweeps
    assert products_run["input_gradient"] == 1
    assert products_run["weight_gradient"] == (schedule != "frozen")


def test_metrics_take_no_further_pass(products_run):
    hidden, head, batch = problem()
    objective = OBJECTIVES["token"]
    for metrics in (False, True):
        products_run["logits"] = 0
        options = hl.Options(chunk_tokens=CHUNK, metrics=metrics)
        hl.head_loss(hidden, head, batch, objective, options)
        assert products_run["logits"] == -(-int((batch.targets != -100).sum()) // CHUNK)


def test_main_grad_needs_no_accumulator():
    hidden, head, batch = problem(torch.bfloat16)
    peaks, largest = [], []
    for given in ({}, {"upstream": 1.0, "main_grad": torch.zeros(V, H)}):
        hidden.grad = head.weight.grad = None
        options = hl.Options(chunk_tokens=8, **given)
        live, _ = measured(hidden, head, batch, hl.cross_entropy(), options)
        peaks.append(live.peak)
        largest.append(live.largest)
    assert largest[1] < V * H == largest[0]
    assert peaks[1] < peaks[0]
