"""`rope_ext.integrations.transformers`: what is replaced in a model, and what `unpatch` leaves of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from rope_ext.integrations.transformers import kernel_mapping, patch, patch_all, unpatch, unpatch_all
from rotary_functions import B, D, H, K, S, count, pairs_by_halves, right, tables


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 2, "vocab_size": 50, **changes})).eval()


IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 32, 38, 4]])


def test_patched_model_gives_the_same_bits_and_unpatch_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.models.llama import modeling_llama

    model, other = llama(), llama()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    function = modeling_llama.apply_rotary_pos_emb
    expected, calls = count(lambda: model(IDS).logits)
    assert calls == 0
    assert patch(model) is model
    assert model.rope_ext_report == {
        "patched": [f"model.layers.{i}.self_attn: apply_rotary_pos_emb" for i in range(2)],
        "skipped": [],
    }
    assert "2 rotary functions" in capsys.readouterr().err
    logits, calls = count(lambda: model(IDS).logits)
    assert calls == 2 and torch.equal(logits, expected)
    assert patch(patch(model)).rope_ext_report == patch(model).rope_ext_report  # again changes nothing

    assert modeling_llama.apply_rotary_pos_emb is function
    assert count(lambda: other(IDS))[1] == 0  # another model of the class
    assert unpatch(model) is model
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(value is before[name][key] for key, value in vars(module).items())
    logits, calls = count(lambda: model(IDS).logits)
    assert calls == 0 and torch.equal(logits, expected)


def test_generate() -> None:
    model = llama()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0  # padded on the left

    def answers() -> list[Tensor]:
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        cache = StaticCache(config=model.config, max_cache_len=20)
        return [
            model.generate(IDS, **options),
            model.generate(IDS, **options, cache=cache),
            model.generate(IDS, **options, use_cache=False),
        ]

    expected = answers()
    patch(model)
    got, calls = count(answers)
    assert calls == 3 * 8 * 2 and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training(checkpointing: bool) -> None:
    gradients = []
    for patched in (False, True):
        model = llama().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        if patched:
            patch(model)
        model(IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for old, new in zip(*gradients, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-7)


def test_compile_into_one_graph() -> None:
    model = patch(llama())
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    logits = torch.compile(model, fullgraph=True, dynamic=True, backend=keep)(IDS).logits
    assert torch.equal(logits, model(IDS).logits)
    (graph,) = graphs
    assert sum("rope" in str(node.target) for node in graph.graph.nodes) == 2


def test_autocast_and_half_precision() -> None:
    model = llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(IDS).logits
        logits, calls = count(lambda: patch(model)(IDS).logits)
    assert calls == 2 and logits.dtype == expected.dtype
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2)


def test_deepcopy() -> None:
    model = patch(llama())
    twin = copy.deepcopy(model)
    expected = model(IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    logits, calls = count(lambda: twin(IDS).logits)  # of its own weights
    assert calls == 2 and torch.equal(logits, expected)
    assert count(lambda: unpatch(twin)(IDS))[1] == 0
    assert count(lambda: model(IDS))[1] == 2


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_that_replace_forward(first: str) -> None:
    """As accelerate does: the method moves to another attribute, and back when the hook is taken off."""
    model = llama()
    attention = model.model.layers[1].self_attn

    def hook() -> None:
        attention._old_forward = attention.forward
        attention.forward = lambda *args, **kwargs: attention._old_forward(*args, **kwargs)

    for act in (hook, lambda: patch(model)) if first == "hook" else (lambda: patch(model), hook):
        act()
    assert count(lambda: model(IDS))[1] == 2
    unpatch(model)
    assert count(lambda: model(IDS))[1] == 0
    assert attention._old_forward == MethodType(type(attention).forward, attention)


@pytest.fixture
def everywhere() -> Iterator[None]:
    patch_all()
    yield
    unpatch_all()


def test_process_wide(everywhere: None) -> None:
    patch_all()  # twice is once
    model = llama()
    assert len(model.rope_ext_report["patched"]) == 2
    assert count(lambda: model(IDS))[1] == 2
    unpatch_all()
    assert count(lambda: model(IDS))[1] == 0 and not hasattr(model, "rope_ext_report")
    assert count(lambda: llama()(IDS))[1] == 0


def test_built_under_meta_and_another_default_dtype(everywhere: None) -> None:
    """As from_pretrained builds models."""
    from transformers.models.arcee import modeling_arcee  # seen by no other test, so that it is tried here

    random = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = modeling_arcee.ArceeModel(modeling_arcee.ArceeConfig(num_hidden_layers=1, vocab_size=8))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(model.rope_ext_report["patched"]) == 1
    assert torch.equal(torch.get_rng_state(), random)


# ---- modules written otherwise


def helper(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """No rotation, but one in it."""
    return right(x, x, cos, sin)[0] + x


def deeper(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    return sum((lambda: (helper(x, *table), x))())


class Indirect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def rotated(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return deeper(x, table)

    @torch.no_grad()
    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return self.rotated(x, table) + pairs_by_halves(x, x, *table)[1]


class Child(Indirect):
    def rotated(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return super().rotated(x, table)


def test_functions_in_functions() -> None:
    module, x, table = Indirect(), torch.randn(B, H, S, D), tables(D, "halves", torch.float32)
    expected = module(x, table)
    patch(module)
    reason = "it computes no rotation that the operator has"
    assert module.rope_ext_report == {
        "patched": ["Indirect: right"],
        "skipped": [("Indirect: pairs_by_halves", reason)],
    }
    result, calls = count(lambda: module(x, table))
    assert calls == 1 and module.calls == 2 and torch.equal(result, expected)


def test_a_method_that_rotates() -> None:
    """The speech models' form: heads merged, cos and sin in one tensor."""
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as modeling

    config = modeling.Wav2Vec2ConformerConfig(
        hidden_size=H * D, num_attention_heads=H, position_embeddings_type="rotary"
    )
    module, x = modeling.Wav2Vec2ConformerSelfAttention(config).eval(), torch.randn(B, S, H * D)
    table = modeling.Wav2Vec2ConformerRotaryPositionalEmbedding(config)(x)
    expected = module(x, relative_position_embeddings=table)[0]
    assert patch(module).rope_ext_report["patched"] == ["Wav2Vec2ConformerSelfAttention: _apply_rotary_embedding"]
    result, calls = count(lambda: module(x, relative_position_embeddings=table)[0])
    assert calls == 1 and torch.equal(result, expected)
    assert "_apply_rotary_embedding" not in vars(unpatch(module))


class Static(nn.Module):
    @staticmethod
    def rotated(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return right(x, x, *table)[0]


def test_static_methods_are_mentioned() -> None:
    report = patch(Static()).rope_ext_report
    assert report == {"patched": [], "skipped": [("Static: right", "it is called in a static method")]}


def kernelised(function: Callable[..., Any]) -> nn.Module:
    """What the kernels package makes of a function that it may replace."""

    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Func()


right_as_a_module = kernelised(right)


class WithKernels(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return right_as_a_module(q, k, cos, sin)


@pytest.mark.parametrize("road", ["patch", "mapping"])
def test_functions_that_the_kernels_package_has_made_into_modules(road: str) -> None:
    module = WithKernels()
    q, k, table = torch.randn(B, H, S, D), torch.randn(B, K, S, D), tables(D, "halves", torch.float32)
    expected = module(q, k, *table)
    if road == "patch":
        assert patch(module).rope_ext_report["patched"] == ["WithKernels: right"]
    else:
        layer = kernel_mapping()["rotary_pos_emb"]["cpu"].load()
        right_as_a_module.forward = MethodType(layer.forward, right_as_a_module)
    results, calls = count(lambda: module(q, k, *table))
    vars(right_as_a_module).pop("forward", None)
    assert calls == 1 and all(map(torch.equal, results, expected))


def test_methods_of_a_base_class() -> None:
    module = patch(Child())
    assert ("Child: right", "it is reached through super()") in module.rope_ext_report["skipped"]
    assert not module.rope_ext_report["patched"]
