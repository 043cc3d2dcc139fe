"""``from_config``: for a transformers config or the JSON of a checkpoint, what that model itself would rotate by."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest
import torch

from rope_ext.tables import attention_factor, from_config, inv_freq, layer_types, precompute_freqs_cis, rope_arguments

transformers = pytest.importorskip("transformers", reason="parity needs the transformers package, a test dependency")
transformers.logging.set_verbosity_error()

YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}

# model, prefix of its class names, fields of its config.json that differ from its class defaults
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "Llama", {"rope_theta": 500000.0, "max_position_embeddings": 300}),
    ("llama", "Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 300}),
    (
        "llama",
        "Llama",
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "rope_theta": 5e5},
    ),
    (
        "phi3",
        "Phi3",
        {
            "rope_scaling": {"type": "longrope", **LISTS},
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 4096,
        },
    ),
    ("phi", "Phi", {"hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4}),
    ("gpt_neox", "GPTNeoX", {"rotary_pct": 0.25, "rotary_emb_base": 20000}),
    ("gpt_oss", "GptOss", {}),
    ("deepseek_v3", "DeepseekV3", {"rope_scaling": YARN}),
    ("glm", "Glm", {}),
    ("cohere", "Cohere", {}),
    ("qwen2", "Qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("mixtral", "Mixtral", {}),
    ("stablelm", "StableLm", {}),
    (
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        {"head_dim": 128, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
]
LAYERED: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma3", "Gemma3Text", {}),
    (
        "gemma3",
        "Gemma3Text",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4, "rope_theta": 1e6},
    ),
    ("gemma4", "Gemma4Text", {}),
    ("modernbert", "ModernBert", {}),
]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(MODELS)]


def config_and_rotary(name: str, prefix: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(configuration, f"{prefix}Config")(**deepcopy(fields))  # it writes into its arguments
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding", None) or getattr(modeling, f"{prefix[:-4]}RotaryEmbedding")
    return config, rotary(config)


@pytest.mark.parametrize(("name", "prefix", "fields"), MODELS, ids=IDS)
def test_a_models_own_frequencies(name: str, prefix: str, fields: dict[str, Any]) -> None:
    config, rotary = config_and_rotary(name, prefix, fields)
    arguments = rope_arguments(config)
    assert torch.equal(inv_freq(**arguments), rotary.inv_freq)
    assert attention_factor(**arguments) == rotary.attention_scaling

    rows = 333
    cos, sin = rotary(torch.zeros(1), torch.arange(rows)[None])
    pairs = arguments["dim"] // 2
    # Half-split models repeat the pairs one after the other, interleaved ones in place.
    step = 2 if pairs > 1 and torch.equal(cos[..., 0::2], cos[..., 1::2]) else 1
    expected = torch.complex(cos[0, :, ::step][:, :pairs], sin[0, :, ::step][:, :pairs])
    assert torch.equal(from_config(config, rows), expected)


@pytest.mark.parametrize(("name", "prefix", "fields"), LAYERED, ids=["gemma3", "gemma3-old", "gemma4", "modernbert"])
def test_a_table_for_each_layer_type(name: str, prefix: str, fields: dict[str, Any]) -> None:
    config, rotary = config_and_rotary(name, prefix, fields)
    names = layer_types(config)
    assert sorted(names) == ["full_attention", "sliding_attention"]
    tables = from_config(config, 40)
    assert isinstance(tables, dict)
    for layer_type in names:
        arguments = rope_arguments(config, layer_type)
        assert torch.equal(inv_freq(**arguments), getattr(rotary, f"{layer_type}_inv_freq"))
        cos, sin = rotary(torch.zeros(1), torch.arange(40)[None], layer_type)
        pairs = arguments["dim"] // 2
        assert torch.equal(tables[layer_type], torch.complex(cos[0, :, :pairs], sin[0, :, :pairs]))
        assert torch.equal(tables[layer_type], from_config(config, 40, layer_type=layer_type))
    assert not torch.equal(inv_freq(**rope_arguments(config, names[0])), inv_freq(**rope_arguments(config, names[1])))


@pytest.mark.parametrize(("name", "prefix", "fields"), LAYERED)
def test_json_of_layer_types_says_the_same_as_the_object(name: str, prefix: str, fields: dict[str, Any]) -> None:
    config, _ = config_and_rotary(name, prefix, fields)
    for layer_type in layer_types(config):
        expected = inv_freq(**rope_arguments(config, layer_type))
        assert torch.equal(inv_freq(**rope_arguments(config.to_dict(), layer_type)), expected)


def test_gemma_4_full_layers_have_wider_heads() -> None:
    rope = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}, "sliding_attention": {}}
    json = {"text_config": {"head_dim": 256, "global_head_dim": 512, "rope_parameters": rope}}
    assert rope_arguments(json, "full_attention")["dim"] == 512
    assert rope_arguments(json, "sliding_attention")["dim"] == 256


@pytest.mark.parametrize(("name", "prefix", "fields"), MODELS, ids=IDS)
def test_json_says_the_same_as_the_object(name: str, prefix: str, fields: dict[str, Any]) -> None:
    config, _ = config_and_rotary(name, prefix, fields)
    assert torch.equal(inv_freq(**rope_arguments(config.to_dict())), inv_freq(**rope_arguments(config)))


@pytest.mark.parametrize(
    ("name", "prefix", "json"),
    [
        ("llama", "Llama", {"hidden_size": 512, "num_attention_heads": 8, "rope_theta": 5e5}),
        (
            "phi3",
            "Phi3",
            {
                "hidden_size": 3072,
                "num_attention_heads": 32,
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", **LISTS},
            },
        ),
        ("deepseek_v3", "DeepseekV3", {"qk_rope_head_dim": 64, "hidden_size": 7168, "rope_scaling": YARN}),
        ("gpt_neox", "GPTNeoX", {"hidden_size": 768, "num_attention_heads": 12, "rotary_pct": 0.25}),
        (
            "qwen2",
            "Qwen2",
            {"hidden_size": 896, "num_attention_heads": 14, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
    ],
)
def test_a_raw_old_config_json(name: str, prefix: str, json: dict[str, Any]) -> None:
    """Straight from a checkpoint, without transformers' class to fill it in."""
    from_object = rope_arguments(config_and_rotary(name, prefix, json)[0])
    before = deepcopy(json)
    arguments = rope_arguments(json)
    assert json == before
    assert arguments["dim"] == from_object["dim"]
    for seq_len in (None, 5000):
        assert torch.equal(inv_freq(**arguments, seq_len=seq_len), inv_freq(**from_object, seq_len=seq_len))


@pytest.mark.parametrize(("name", "prefix"), [("gptj", "GPTJ"), ("codegen", "CodeGen")])
def test_rotary_dim_is_the_rotated_part_of_a_head(name: str, prefix: str) -> None:
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, f"{prefix}Config")(n_embd=512, n_head=4, rotary_dim=48, n_positions=40)
    sin, cos = modeling.create_sinusoidal_positions(40, 48).chunk(2, -1)
    for source in (config, config.to_dict()):
        table = from_config(source, 40)
        assert table.shape == (40, 24)
        assert torch.allclose(table, torch.complex(cos, sin), rtol=0, atol=2e-6)


def test_multimodal_configs_mean_their_text_part() -> None:
    config = transformers.Qwen2VLConfig()
    assert torch.equal(inv_freq(**rope_arguments(config)), inv_freq(**rope_arguments(config.text_config)))
    json = {"text_config": {"head_dim": 16, "rope_theta": 1e6}, "vision_config": {"head_dim": 80}}
    assert torch.equal(inv_freq(**rope_arguments(json)), inv_freq(16, 1e6))


def test_rows_and_options() -> None:
    config = transformers.LlamaConfig(head_dim=16, max_position_embeddings=77)
    scaling = {"rope_type": "default"}
    assert torch.equal(from_config(config), precompute_freqs_cis(16, 77, scaling=scaling))
    assert torch.equal(from_config(config, 9, exact=True), precompute_freqs_cis(16, 9, scaling=scaling, exact=True))


def test_yarns_truncate_is_read_wherever_it_stands() -> None:
    """transformers overlooks it inside a layer type's dict."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 1.5e5}
    expected = inv_freq(64, scaling={**yarn, "truncate": False})
    assert not torch.equal(expected, inv_freq(64, scaling=yarn))
    for rope in ({"full_attention": {**yarn, "truncate": False}}, {"full_attention": yarn, "truncate": False}):
        arguments = rope_arguments({"head_dim": 64, "rope_parameters": rope}, "full_attention")
        assert torch.equal(inv_freq(**arguments), expected)


@pytest.mark.parametrize(
    ("config", "layer_type", "message"),
    [
        ({"rope_theta": 1e4}, None, "head_dim"),
        ({"head_dim": 16, "rope_theta": 1e4}, "full_attention", "share one table"),
        ({"head_dim": 16, "rope_parameters": {"full_attention": {}}}, "global", "full_attention.*'global'"),
        ({"head_dim": 16, "max_position_embeddings": 9, "rope_scaling": {"type": "cubic"}}, None, "'cubic'"),
        ({"head_dim": 16}, None, "end is needed"),
    ],
)
def test_refusals(config: dict[str, Any], layer_type: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config, layer_type=layer_type)
