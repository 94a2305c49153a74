"""`Head` has the documented formula and errors, and reads torch and PEFT modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headloss.head.head import Head, Lora

V, H, R, T = 11, 6, 3, 5


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


WEIGHT, HIDDEN, BIAS = draw(V, H, seed=1), draw(T, H, seed=2), draw(V, seed=3)
LORA = Lora(a=draw(R, H, seed=4), b=draw(V, R, seed=5), scaling=2.0)


# ---------------------------------------------------------------------- the formula


def test_order_of_the_transform():
    temperature = torch.rand(T, dtype=torch.float64) + 0.5
    head = Head(WEIGHT, BIAS, temperature, 1.5, 0.7, 9, lora=(LORA,))
    raw = HIDDEN @ WEIGHT.T + BIAS + 2.0 * HIDDEN @ LORA.a.T @ LORA.b.T
    want = 1.5 * torch.tanh(raw * 0.7 / 1.5) / temperature[:, None]
    assert head.vocabulary == 9
    torch.testing.assert_close(head.logits(HIDDEN), want[:, :9])


def test_logits_keep_the_shape_of_the_tokens():
    hidden = draw(2, 3, H)
    head = Head(WEIGHT, temperature=torch.full((2, 3), 2.0))
    assert head.vocabulary == V
    torch.testing.assert_close(head.logits(hidden), hidden @ WEIGHT.T / 2)
    torch.testing.assert_close(Head(WEIGHT).logits(hidden[0, 0]), hidden[0, 0] @ WEIGHT.T)
    adapted, rows = Head(WEIGHT, lora=(LORA,)), hidden.view(6, H)
    torch.testing.assert_close(adapted.logits(hidden).view(6, V), adapted.logits(rows))
    torch.testing.assert_close(adapted.logits(rows[0]), adapted.logits(rows)[0])
    (gradient,) = torch.autograd.grad(adapted.logits(hidden.requires_grad_()).sum(), hidden)
    want = (WEIGHT + LORA.scaling * LORA.b @ LORA.a).sum(0)
    torch.testing.assert_close(gradient, want.expand_as(hidden))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_are_float32(dtype):
    hidden, weight = HIDDEN.to(dtype), WEIGHT.to(dtype)
    want = hidden.double() @ weight.double().T
    with torch.autocast("cpu"):
        got = Head(weight).logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_gradients_through_every_part():
    leaves = [t.clone().requires_grad_() for t in (HIDDEN, WEIGHT, BIAS, LORA.a, LORA.b)]

    def logits(hidden, weight, bias, a, b):
        return Head(weight, bias, 0.7, 3.0, 0.5, lora=(Lora(a=a, b=b, scaling=0.5),)).logits(hidden)

    assert torch.autograd.gradcheck(logits, leaves)


def test_factors_sum_to_the_raw_logits():
    head = Head(WEIGHT, lora=(LORA, Lora(a=draw(1, H), b=draw(V, 1), scaling=-1.0)), vocab_size=4)
    factors = head.factors(HIDDEN)
    assert [(tuple(f.shape), tuple(w.shape)) for f, w in factors] == [
        ((T, H), (V, H)),
        ((T, R), (V, R)),
        ((T, 1), (V, 1)),
    ]
    assert factors[0][0] is HIDDEN and factors[0][1] is WEIGHT and factors[1][1] is LORA.b
    torch.testing.assert_close(
        sum(f @ w.T for f, w in factors),
        HIDDEN @ (WEIGHT + 2.0 * LORA.b @ LORA.a - draw(V, 1) @ draw(1, H)).T,
    )


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight": [1.0]}, TypeError, "weight: got list, want a tensor"),
        ({"weight": WEIGHT.to(torch.int8)}, TypeError, r"weight: got torch.int8.*quantised"),
        ({"weight": WEIGHT.to(torch.float8_e4m3fn)}, TypeError, "weight: got torch.float8_e4m3fn"),
        ({"weight": WEIGHT[0]}, ValueError, r"weight: got shape \(6,\), want \[V, H\]"),
        ({"bias": 1.0}, TypeError, "bias: got 1.0, want a floating tensor"),
        ({"bias": BIAS[:3]}, ValueError, r"bias: got shape \(3,\), want \(11,\)"),
        ({"temperature": 0}, ValueError, "temperature: got 0, want > 0"),
        ({"temperature": float("nan")}, ValueError, "temperature: got nan, want a finite"),
        ({"temperature": "hot"}, TypeError, "temperature: got 'hot', want a number"),
        ({"temperature": torch.ones(T, dtype=torch.int64)}, TypeError, "temperature: got torch.in"),
        ({"temperature": torch.ones(T, requires_grad=True)}, ValueError, "temperature.*detach"),
        ({"softcap": 0.0}, ValueError, "softcap: got 0.0, want > 0"),
        ({"softcap": torch.ones(())}, TypeError, "softcap: got a torch.float32 tensor.*constant"),
        ({"logit_scale": float("inf")}, ValueError, "logit_scale: got inf, want a finite"),
        ({"logit_scale": None}, TypeError, "logit_scale: got None"),
        ({"vocab_size": 12}, ValueError, "vocab_size: got 12, want 1 <= vocab_size <= 11"),
        ({"vocab_size": 0}, ValueError, "vocab_size: got 0"),
        ({"vocab_size": 3.0}, TypeError, "vocab_size: got 3.0, want an integer"),
        ({"lora": [LORA]}, TypeError, "lora: got list, want a tuple"),
        ({"lora": (LORA,), "weight": WEIGHT[:, 1:]}, ValueError, r"lora\[0\].a: got .*\[r, 5\]"),
        ({"lora": (LORA,), "weight": WEIGHT[1:]}, ValueError, r"lora\[0\].b: got .*\[10, r\]"),
    ],
)
def test_bad_head(arguments, error, message):
    with pytest.raises(error, match=message):
        Head(**{"weight": WEIGHT, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"b": draw(V, R + 1)}, ValueError, r"lora.b: got shape \(11, 4\), want \[V, 3\]"),
        ({"b": LORA.b.float()}, ValueError, "lora.b: got torch.float32, want .*torch.float64"),
        ({"a": draw(H)}, ValueError, r"lora.a: got shape \(6,\), want \[r, H\]"),
        ({"scaling": LORA.a}, TypeError, "lora.scaling: got a torch.float64 tensor"),
        ({"dropout": 1.0}, ValueError, "lora.dropout: got 1.0, want 0 <= dropout < 1"),
    ],
)
def test_bad_lora(arguments, error, message):
    with pytest.raises(error, match=message):
        Lora(**{"a": LORA.a, "b": LORA.b, "scaling": 1.0, **arguments})


@pytest.mark.parametrize(
    ("head", "hidden", "error", "message"),
    [
        (Head(WEIGHT), HIDDEN.long(), TypeError, "hidden: got a torch.int64 tensor"),
        (Head(WEIGHT), HIDDEN[:, 1:], ValueError, r"hidden: got shape \(5, 5\), want \[.., 6\]"),
        (Head(WEIGHT), HIDDEN.float(), ValueError, "hidden: got torch.float32, .*torch.float64"),
        (Head(WEIGHT.to("meta")), HIDDEN, ValueError, "weight: got device meta, want .*cpu"),
        (Head(WEIGHT, BIAS.to("meta")), HIDDEN, ValueError, "bias: got device meta"),
        (Head(WEIGHT, temperature=BIAS), HIDDEN, ValueError, r"temperature: .*\(11,\), .*\(5,\)"),
    ],
)
def test_bad_hidden(head, hidden, error, message):
    with pytest.raises(error, match=message):
        head.validate(hidden)


def test_validate_accepts():
    Head(WEIGHT).validate(HIDDEN.float(), compute_dtype=torch.bfloat16)
    Head(WEIGHT, temperature=BIAS).validate(HIDDEN, token_shape=torch.Size([V]))
    # A vocabulary slice may have fewer rows than the vocabulary.
    assert Head(WEIGHT, vocab_size=100, vocab_mesh_dim="tp").vocab_size == 100


class Packed(nn.Parameter):
    """A parameter class like that of 4-bit weights: not torch's own, with a floating dtype."""


def test_quantised_parameter_class():
    with pytest.raises(TypeError, match=r"weight: got torch.float64 in a .*Packed.*dequantised"):
        Head(Packed(WEIGHT))


@pytest.fixture
def mesh(tmp_path):
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    distributed.destroy_process_group()


def test_fsdp2_is_read_inside_the_forward(mesh):
    from torch.distributed.fsdp import fully_shard

    class Reader(Model):
        def forward(self, hidden):
            return Head.of(self.lm_head).logits(hidden)

    model, plain = fully_shard(Reader(), mesh=mesh), Model()
    model(HIDDEN).square().sum().backward()
    plain(HIDDEN).square().sum().backward()
    torch.testing.assert_close(model.lm_head.weight.grad.full_tensor(), plain.lm_head.weight.grad)
    model.reshard()
    outside = Head.of(model.lm_head)
    with pytest.raises(TypeError, match=r"weight: got a DTensor placed .*full_tensor"):
        outside.validate(HIDDEN)


# ---------------------------------------------------------------------- torch modules


def test_linear_and_embedding():
    linear, embedding = nn.Linear(H, V), nn.Embedding(V, H)
    head = Head.of(linear, temperature=0.5)
    assert head.weight is linear.weight and head.bias is linear.bias and head.temperature == 0.5
    assert Head.of(nn.Linear(H, V, bias=False)).bias is None
    assert Head.of(embedding).weight is embedding.weight and Head.of(embedding).bias is None
    assert Head.of(torch.compile(linear)).weight is linear.weight
    with pytest.raises(TypeError, match="colour"):
        Head.of(linear, colour=1)


def test_tied_embedding_takes_both_gradients():
    embedding = nn.Embedding(V, H).double()
    embedding.weight.data.copy_(WEIGHT)
    ids = torch.arange(T)
    Head.of(embedding).logits(embedding(ids)).square().sum().backward()
    weight = WEIGHT.clone().requires_grad_()
    (weight[ids] @ weight.T).square().sum().backward()
    torch.testing.assert_close(embedding.weight.grad, weight.grad)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_unknown_modules_are_refused_by_name():
    with pytest.raises(TypeError, match=r"module: got torch\.nn.*Conv1d, want nn.Linear"):
        Head.of(nn.Conv1d(H, V, 1))
    with pytest.raises(TypeError, match=r"module: got .*\.Scaled"):
        Head.of(Scaled(H, V))
    with pytest.raises(TypeError, match=r"parametrize computes its weight"):
        Head.of(nn.utils.parametrizations.weight_norm(nn.Linear(H, V)))
    hooked, patched = nn.Linear(H, V), nn.Linear(H, V)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(TypeError, match=r"forward hook .*<lambda> would not run"):
        Head.of(hooked)
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        hooked = nn.Linear(H, V)
        getattr(hooked, register)(lambda module, *gradients: None)
        with pytest.raises(TypeError, match=r"hook .*<lambda> would not run"):
            Head.of(hooked)
    patched.forward = lambda input: input
    with pytest.raises(TypeError, match="replaced on the instance"):
        Head.of(patched)
    with pytest.raises(TypeError, match="module: got Tensor"):
        Head.of(WEIGHT)  # type: ignore[arg-type]


def test_a_hook_on_the_lookup_of_a_tied_embedding_changes_nothing():
    """A hook on a tied embedding's lookup (`enable_input_require_grads`) changes nothing."""
    embedding, hidden = nn.Embedding(V, H).double(), draw(5, H)
    embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    torch.testing.assert_close(Head.of(embedding).logits(hidden), hidden @ embedding.weight.T)
    with pytest.raises(TypeError, match="parametrize computes its weight"):
        Head.of(nn.utils.parametrizations.weight_norm(nn.Embedding(V, H)))


def test_an_offloaded_head_is_refused_by_name():
    accelerate = pytest.importorskip("accelerate")
    for module in (nn.Linear(H, V), nn.Embedding(V, H)):
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
        with pytest.raises(TypeError, match="accelerate's offload holds its weight; leave"):
            Head.of(module)


# ---------------------------------------------------------------------- PEFT


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(V, H)
        self.lm_head = nn.Linear(H, V)
        self.double()

    def forward(self, hidden):
        return self.lm_head(hidden)


def wrap(method: str = "LoraConfig", target: str = "lm_head", **options):
    """Return a model with LoRA on the head, with random factors."""
    peft = pytest.importorskip("peft")
    if method == "LoraConfig":
        options = {"r": R, "lora_alpha": 7, "init_lora_weights": False, **options}
    config = getattr(peft, method)(target_modules=[target], **options)
    return peft.get_peft_model(Model(), config).double()


def assert_same(model, module=None, adapters: int | None = None) -> Head:
    """Check that the head's logits and all gradients equal those of PEFT's forward."""
    module = model.base_model.model.lm_head if module is None else module
    grads = []
    head = Head.of(module)
    for forward in (module, head.logits):
        hidden = HIDDEN.clone().requires_grad_()
        model.zero_grad()
        torch.manual_seed(0)
        logits = forward(hidden)
        (logits.square().sum() + logits.sum()).backward()
        grads.append([logits, hidden.grad, *(p.grad for p in model.parameters())])
    for want, got in zip(*grads, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want)
    if adapters is not None:
        assert len(head.lora) == adapters
    return head


def test_lora_is_pefts_own():
    head = assert_same(wrap(), adapters=1)
    assert head.lora[0].scaling == pytest.approx(7 / R) and head.lora[0].dropout == 0
    assert not head.weight.requires_grad


def test_factors_give_pefts_gradients():
    model = wrap()
    layer = model.base_model.model.lm_head
    factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    want = torch.autograd.grad(layer(HIDDEN).square().sum(), factors)
    head = Head.of(layer)
    raw = sum(f @ w.T for f, w in head.factors(HIDDEN)) + head.bias
    got = torch.autograd.grad(raw.square().sum(), factors)
    torch.testing.assert_close(got, want)


def test_rank_stabilised():
    assert assert_same(wrap(use_rslora=True)).lora[0].scaling == pytest.approx(7 / R**0.5)


def test_dropout():
    model = wrap(lora_dropout=0.4)
    head = assert_same(model.train(), adapters=1)  # compares outputs under equal dropout masks
    assert head.lora[0].dropout == 0.4
    torch.manual_seed(3)
    features = head.lora[0].features(HIDDEN)
    torch.manual_seed(3)
    want = head.lora[0].scaling * F.dropout(HIDDEN, 0.4) @ head.lora[0].a.T
    torch.testing.assert_close(features, want)
    assert assert_same(model.eval()).lora[0].dropout == 0


def test_several_adapters():
    import peft

    model = wrap()
    model.add_adapter(
        "second",
        peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False),
    )
    model.add_adapter(
        "elsewhere",
        peft.LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False),
    )
    model.double()
    model.base_model.set_adapter(["default", "second"])
    assert_same(model, adapters=2)
    model.set_adapter("second")
    assert assert_same(model, adapters=1).lora[0].a.shape == (2, H)
    model.set_adapter("elsewhere")
    assert_same(model, adapters=0)


def test_disabled_and_merged():
    model = wrap()
    with model.disable_adapter():
        assert_same(model, adapters=None)
        assert Head.of(model.base_model.model.lm_head).lora == ()
    model.merge_adapter()
    assert assert_same(model).lora == ()
    with model.disable_adapter(), pytest.raises(ValueError, match="merged adapters are disabled"):
        Head.of(model.base_model.model.lm_head)
    model.unmerge_adapter()
    assert_same(model, adapters=1)


def test_modules_to_save():
    model = wrap(target="embed_tokens", modules_to_save=["lm_head"])
    wrapper = model.base_model.model.lm_head
    wrapper.modules_to_save["default"].weight.data.add_(1.0)
    head = assert_same(model)
    assert head.weight is wrapper.modules_to_save["default"].weight
    with model.disable_adapter():
        assert assert_same(model).weight is wrapper.original_module.weight


def test_adapters_in_float32_over_a_bfloat16_weight():
    model = wrap()
    layer = model.base_model.model.lm_head
    layer.base_layer.bfloat16()
    layer.lora_A.float()
    layer.lora_B.float()
    (_, weight), (features, b) = Head.of(layer).factors(HIDDEN.bfloat16())
    assert (weight.dtype, features.dtype, b.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


def test_lora_on_a_tied_embedding():
    model = wrap(target="embed_tokens")
    layer = model.base_model.model.embed_tokens
    effective = layer(torch.arange(V))  # the merged weight [V, H], computed by PEFT's own forward
    head = Head.of(layer)
    torch.testing.assert_close(head.logits(HIDDEN), HIDDEN @ effective.T)
    factors = [layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]]
    want = torch.autograd.grad((HIDDEN @ effective.T).square().sum(), factors)
    got = torch.autograd.grad(head.logits(HIDDEN).square().sum(), factors)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "adapter 'default' is a DoraLinearVariant"),
        ({"lora_bias": True}, r"has a bias \(lora_bias=True\)"),
        ({"method": "IA3Config", "feedforward_modules": []}, r"ia3\.layer\.Linear"),
        ({"method": "OFTConfig", "oft_block_size": 2}, r"oft\.layer\.Linear"),
        ({"target": "embed_tokens", "trainable_token_indices": {"lm_head": [1]}}, "TrainableToken"),
    ],
)
def test_other_adapters_are_refused_by_name(options, message):
    model = wrap(**options)
    with pytest.raises(TypeError, match=message):
        Head.of(model.base_model.model.lm_head)


def test_transposed_weight_is_refused():
    layer = wrap().base_model.model.lm_head
    layer.fan_in_fan_out = True
    with pytest.raises(TypeError, match="fan_in_fan_out"):
        Head.of(layer)
