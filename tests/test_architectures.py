"""Tiny models of Hugging Face families, one or more for every arrangement of a rotary embedding, patched and compared.

The comparisons are those of ``benchmarks/architectures.py``, which goes through every family that transformers has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="needs the transformers package, a test dependency")

from benchmarks import patched_model
from benchmarks.patched_model import check, runnable
from benchmarks.tiny_models import build, tiny, towers

# architecture -> its models that rotate
SAMPLE: dict[str, list[str]] = {
    "llama": ["LlamaForCausalLM"],  # halves
    "gpt_neox": ["GPTNeoXForCausalLM"],  # a quarter of each head
    "gptj": ["GPTJForCausalLM"],  # neighbours, partial, heads after tokens
    "cohere": ["CohereForCausalLM"],  # neighbours, by a rotate_half of another meaning
    "glm": ["GlmForCausalLM"],  # neighbours, partial, the table in halves
    "ernie4_5": ["Ernie4_5ForCausalLM"],  # neighbours, in float32
    "gemma3": ["Gemma3ForCausalLM"],  # a table for each kind of layer
    "gpt_oss": ["GptOssForCausalLM"],  # a table of half the width
    "nanochat": ["NanoChatForCausalLM"],  # the other direction
    "deepseek_v2": ["DeepseekV2ForCausalLM"],  # complex; MLA: a part of q, one head of k
    "deepseek_v3": ["DeepseekV3ForCausalLM"],  # MLA: neighbours taken, halves given
    "llama4": ["Llama4ForCausalLM", "Llama4VisionModel"],  # complex, on layers that rotate; 2-D
    "qwen2_vl": ["Qwen2VLTextModel", "Qwen2VisionTransformerPretrainedModel"],  # packed patches; mRoPE
    "qwen3_vl": ["Qwen3VLTextModel", "Qwen3VLVisionModel"],  # mRoPE interleaved
    "pixtral": ["PixtralVisionModel"],  # 2-D, a table for the batch
    "dinov3_vit": ["DINOv3ViTModel"],  # the class token and registers stay
    "esm": ["EsmModel"],  # one tensor at a time
    "moonshine": ["MoonshineModel"],  # audio; an encoder and a decoder
    "musicflamingo": ["MusicFlamingoModel"],  # hidden states without heads, in float64
    "persimmon": ["PersimmonForCausalLM"],  # partial, by a slice in the attention
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is compared to the last bit must not depend on how ATen cuts a tensor between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("architecture", SAMPLE)
def test_patched_models_match(architecture: str) -> None:
    found = [t for t in patched_model.run(architecture) if t.outcome not in ("not rotary", "not run")]
    assert sorted(t.name for t in found) == SAMPLE[architecture]
    assert all(t.outcome in ("equal", "close") for t in found), found
    assert all(t.generated == t.name.endswith("ForCausalLM") for t in found), found


def llama(**fields: Any) -> tuple[Any, ...]:
    """A tiny LLaMA and what ``check`` wants to know of it as it is."""
    model_class, config_class = next(towers("llama"))
    model = build(model_class, tiny(config_class(**fields)))
    inputs, before, _, calls = runnable(model)
    return model, inputs, before, calls


# with limits so low that each is in effect for the twelve tokens of the inputs
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {
        "short_factor": [1.0] * 64,
        "long_factor": [1.0 + i / 8 for i in range(64)],
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_every_rope_type(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE_TYPES[rope_type]}
    tower = check(*llama(rope_parameters=rope, max_position_embeddings=8))
    assert tower.outcome == "equal", tower


class Altered(TorchDispatchMode):
    """Rotates the other way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "rope":  # arguments at their defaults do not arrive
            kwargs |= dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            args, kwargs["conj"] = (), not kwargs.get("conj", False)
        return func(*args, **kwargs)


def test_a_wrong_rotation_is_found() -> None:
    inputs = llama()
    with Altered():
        tower = check(*inputs)
    assert tower.outcome == "failed"
    assert "outputs differ by" in tower.reason
    assert "generated logits differ by" in tower.reason
    assert "torch.float32: " in tower.reason and "torch.bfloat16: " in tower.reason


def test_a_function_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch(model: torch.nn.Module, verbose: bool) -> torch.nn.Module:
        model.rope_ext_report = {"patched": [], "skipped": []}  # type: ignore[assignment]
        return model

    inputs = llama()
    monkeypatch.setattr(patched_model, "patch", patch)
    tower = check(*inputs)
    assert tower.outcome == "failed"
    assert "still called, and not reported: apply_rotary_pos_emb, rotate_half" in tower.reason
