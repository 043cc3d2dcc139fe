"""`rope_ext.integrations.transformers`: what is replaced in a model, and what `unpatch` leaves of it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from rope_ext.integrations.transformers import patch, patch_all, unpatch, unpatch_all
from rotary_functions import count


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 2, "vocab_size": 50, **changes})).eval()


IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 32, 38, 4]])


def test_patched_model_gives_the_same_bits_and_unpatch_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.models.llama import modeling_llama

    model, other = llama(), llama()
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
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
        cls, attributes = before[name]
        assert type(module) is cls and vars(module).keys() == attributes.keys()
        assert all(value is attributes[key] for key, value in vars(module).items())
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


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded], ids=lambda f: f.__name__)
def test_copies_of_a_model(copied: Callable[[nn.Module], Any]) -> None:
    model = patch(llama())
    twin = copied(model)
    expected = model(IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    logits, calls = count(lambda: twin(IDS).logits)  # of its own weights
    assert calls == 2 and torch.equal(logits, expected) and twin.rope_ext_report == model.rope_ext_report
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


def test_models_without_a_rotary_function_and_other_things(capsys: pytest.CaptureFixture[str]) -> None:
    report = patch(nn.Linear(1, 1)).rope_ext_report
    assert report == {"patched": [], "skipped": []}
    assert capsys.readouterr().err == "rope_ext: no rotary function found in Linear: nothing changed\n"
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module; got str"):
        patch("model")  # type: ignore[type-var]


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
