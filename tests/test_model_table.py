"""docs/models.md: every line executed beside transformers' own model of every type that the line names.

A text model runs twice on the same tokens, first with all positions 0 and every attention factor 1, where rotary
embeddings leave q and k alone, then as it is. Attention is replaced by a recorder that returns zeros, so that no layer
sees what an earlier one rotated: what the recorder got first are the q and k of the line, what it got then is what the
line must make of them. Where rotation cannot be switched off so, the model's own function is recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.models import FAMILIES, PREAMBLE, Family, markdown
from harness import assert_same
from rope_ext import reference
from rope_ext.tables import grid_positions, llama4_positions

transformers = pytest.importorskip("transformers", reason="parity needs the transformers package, a test dependency")
transformers.logging.set_verbosity_error()

LENGTH, BATCH, SEQLEN = 64, 2, 7
SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "vocab_size": 40,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_experts": 2, "num_local_experts": 2}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
}
GPTJ = {
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_inner": 16,
    "vocab_size": 40,
    "rotary_dim": 20,
    "n_positions": LENGTH,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}


def longrope(pairs: int, original: int, partial: float = 1.0) -> dict[str, Any]:
    lists = {"short_factor": [1.0 + i / 40 for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": partial, **lists}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), **more}}


# Fields beside SMALL, several dicts where a type is worth several runs; a type that is not here needs none.
FIELDS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"rope_parameters": LLAMA3}],
    "ministral": [{"head_dim": 32}],
    "qwen2": [{}, {"rope_parameters": YARN}],
    "qwen3": [{"head_dim": 48}],
    "qwen3_moe": [{"head_dim": 32, **MOE}],
    "mixtral": [MOE],
    "gemma": [{"head_dim": 32}],
    "gemma2": [{"head_dim": 32}],
    "gemma3_text": [{"head_dim": 32, "num_hidden_layers": 6}],
    "gemma4_text": [{"head_dim": 32, "global_head_dim": 64, "vocab_size_per_layer_input": 40, "num_hidden_layers": 6}],
    "modernbert": [{"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}],
    "falcon": [{"alibi": False}],
    "hunyuan_v1_dense": [
        {"head_dim": 32, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}}
    ],
    "gpt_oss": [{"head_dim": 32, **MOE}],
    "phi3": [longrope(16, LENGTH), longrope(16, 8), longrope(12, 8, 0.75)],
    "glm": [{"head_dim": 32}],
    "glm4": [{"head_dim": 32}],
    "nemotron": [{"head_dim": 32}],
    "glm4_moe": [{"n_routed_experts": 2, "first_k_dense_replace": 4}],
    "smollm3": [{"no_rope_layers": [1, 0, 1, 0]}],
    "exaone4": [{"sliding_window": 8}, {"sliding_window": None, "layer_types": ["full_attention"] * 4}],
    "cohere2": [{"sliding_window": 8}],
    "llama4_text": [
        {"head_dim": 32, "intermediate_size_mlp": 16, "use_qk_norm": False, "attn_temperature_tuning": False, **MOE}
    ],
    "deepseek_v2": [MLA, {**MLA, "rope_parameters": DEEPSEEK_YARN}],
    "deepseek_v3": [MLA, {**MLA, "rope_parameters": DEEPSEEK_YARN}],
    "ernie4_5": [{"head_dim": 32}],
    "qwen2_vl_text": [mrope(4, 6, 6)],
    "qwen2_5_vl_text": [mrope(4, 6, 6)],
    "qwen3_vl_text": [{"head_dim": 32, **mrope(6, 5, 5)}],
    "ernie4_5_vl_moe_text": [{**mrope(5, 5, 6), "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": [16, 16]}],
    "glm4v_text": [mrope(2, 3, 3, partial_rotary_factor=0.5)],
}
# Checked by their own function instead: one has attention of its own, one normalises q and k after rotating them.
RECORDED = ("falcon", "hunyuan_v1_dense")
# The tables of these come from torch.polar or meet a complex product: the last bits may differ.
COMPLEX = {"llama4_text", "llama4_vision_model", "deepseek_v2"}
CASES = [
    (family, name, i) for family in FAMILIES for name in family.model_types for i in range(len(FIELDS.get(name, [0])))
]


def test_the_page_is_the_data() -> None:
    page = Path(__file__).parent.parent / "docs" / "models.md"
    assert page.read_text() == markdown(), "run `python docs/models.py`"


def run_line(family: Family, q: Tensor, k: Tensor, **names: Any) -> tuple[Tensor, Tensor]:
    """What the line makes of q and k, (B, S, H, D)."""
    rope = getattr(names.get("config"), "rope_parameters", None) or {}
    scope = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), "theta": rope.get("rope_theta", 1e4)}
    scope |= {"sections": rope.get("mrope_section"), "q": q.clone(), "k": k.clone(), "head_dim": q.shape[-1], **names}
    exec(PREAMBLE, scope)
    scope["rotary_dim"] = eval(family.rotary_dim, scope)
    scope["table"] = eval(family.table, scope)
    assert 2 * scope["table"].shape[-1] == scope["rotary_dim"]
    exec(family.call, scope)
    return scope["q"], scope["k"]


def check(actual: Tensor, expected: Tensor, before: Tensor, exactly: bool) -> None:
    assert not torch.equal(before, expected), "nothing rotates here"
    if exactly:
        assert_same(actual, expected)
    else:  # a unit in each factor, one in each product and sum of either side: 2^-24 of two features, five times
        size = before.abs().amax(-1, keepdim=True)
        assert bool(((actual - expected).abs() <= 10 * 2**-24 * size).all())


# ---- text models

recorded: list[tuple[Tensor, Tensor]] = []


def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    recorded.append((query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()))
    return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def small_model(name: str, fields: dict[str, Any]) -> Any:
    transformers.AttentionInterface.register("record", record)
    config = transformers.AutoConfig.for_model(name, **deepcopy(fields))  # it writes into its arguments
    config._attn_implementation = "record"
    if name == "ernie4_5_vl_moe_text":  # unknown to AutoModel
        model = transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel(config)
    else:
        model = transformers.AutoModel.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model.eval()


def heads(model: Any, tokens: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """q and k of every layer as attention gets them, (B, S, H, D)."""
    recorded.clear()
    with torch.no_grad():
        model(input_ids=tokens, position_ids=positions)
    return list(recorded)


def unsorted(x: Tensor, rotary_dim: int) -> Tensor:
    """DeepSeek V3's halves back into neighbours."""
    a, b = x[..., -rotary_dim:].chunk(2, -1)
    return torch.cat((x[..., :-rotary_dim], torch.stack((a, b), -1).flatten(-2)), -1)


TEXT = [case for case in CASES if "vision" not in case[0].name.lower() and case[1] not in RECORDED]


@pytest.mark.parametrize(("family", "name", "variant"), TEXT, ids=[f"{name}-{i}" for _, name, i in TEXT])
def test_text_model(family: Family, name: str, variant: int) -> None:
    fields = GPTJ if name in ("gptj", "codegen") else SMALL | FIELDS.get(name, [{}])[variant]
    model = small_model(name, fields)
    config = model.config
    tokens = torch.randint(3, 30, (BATCH, SEQLEN))
    axes = (3,) if "sections" in family.table else ()
    positions = torch.randint(0, LENGTH - 4, (*axes, BATCH, SEQLEN))
    seq_len = int(positions.max()) + 1
    after = heads(model, tokens, positions)
    for module in model.modules():
        for attribute in list(vars(module)):
            if attribute.endswith("attention_scaling"):
                setattr(module, attribute, 1.0)
    before = heads(model, tokens, torch.zeros_like(positions))

    assert len(after) == len(before) == config.num_hidden_layers
    turned = []
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        layer_type = layers[layer] if (layers := getattr(config, "layer_types", None)) else None
        names = {"config": config, "layer": layer, "layer_type": layer_type, "positions": positions, "seq_len": seq_len}
        turned.append(bool(eval(family.rotates, names.copy())))
        if not turned[-1]:
            assert all(map(torch.equal, old, new))
            continue
        if name == "deepseek_v3":
            old, new = (tuple(unsorted(x, config.qk_rope_head_dim) for x in pair) for pair in (old, new))
        mine = run_line(family, *old, **names, end=LENGTH)
        for out, want, x in zip(mine, new, old, strict=True):
            check(out, want, x, name not in COMPLEX)
    assert any(turned) and (variant or all(turned) == (family.rotates == "True"))


# ---- models whose own function is recorded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[list[Tensor]]]:
    """``calls(module, name)``: q, k, rotated q, rotated k of every call of that function from now on."""

    def record_function(module: Any, name: str) -> list[list[Tensor]]:
        own, found = getattr(module, name), []

        def recorder(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
            out = own(q, k, *rest, **options)
            found.append([x.detach().clone() for x in (q, k, *out)])
            return out

        monkeypatch.setattr(module, name, recorder)
        return found

    return record_function


def compare(name: str, call: Iterable[Tensor], config: Any, positions: Tensor) -> None:
    family = next(family for family in FAMILIES if name in family.model_types)
    q, k, *expected = (x.contiguous() for x in call)
    mine = run_line(family, q, k, config=config, positions=positions)
    for out, want, x in zip(mine, expected, (q, k), strict=True):
        check(out, want, x, name not in COMPLEX)


def test_falcon_and_hunyuan(calls: Any) -> None:
    positions = torch.randint(0, LENGTH, (BATCH, SEQLEN))
    for name in RECORDED:
        config = transformers.AutoConfig.for_model(name, **SMALL, **FIELDS[name][0])
        model = transformers.AutoModel.from_config(config)
        found = calls(import_module(type(model).__module__), "apply_rotary_pos_emb")
        model(input_ids=torch.randint(3, 30, (BATCH, SEQLEN)), position_ids=positions)
        assert len(found) == config.num_hidden_layers
        compare(name, (x.transpose(1, 2) for x in found[0]), config, positions)


@pytest.mark.parametrize(
    ("name", "prefix", "tower"),
    [
        ("qwen2_vl", "Qwen2VL", "Qwen2VisionTransformerPretrainedModel"),
        ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2_5_VisionTransformerPretrainedModel"),
        ("qwen3_vl", "Qwen3VL", "Qwen3VLVisionModel"),
    ],
)
def test_qwen_vision_tower(name: str, prefix: str, tower: str, calls: Any) -> None:
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = import_module(f"transformers.models.{name}.configuration_{name}")
    sizes = {"depth": 1, "num_heads": 2, "patch_size": 2, "in_channels": 1, "temporal_patch_size": 1}
    widths = {"embed_dim": 64, "hidden_size": 64, "intermediate_size": 16, "out_hidden_size": 16, "mlp_ratio": 1}
    config = getattr(configuration, f"{prefix}VisionConfig")(**sizes, **widths)
    config.window_size = 64  # of 2.5: the whole image in one, which leaves the order of its patches alone
    found = calls(modeling, "apply_rotary_pos_emb_vision")
    rows, columns = 6, 10
    getattr(modeling, tower)(config)(torch.randn(rows * columns, 4), torch.tensor([[1, rows, columns]]))
    positions = grid_positions(rows, columns, merge_size=config.spatial_merge_size)
    compare(f"{name}_vision", found[0], config, positions)


def test_pixtral(calls: Any) -> None:
    modeling = import_module("transformers.models.pixtral.modeling_pixtral")
    sizes = {"hidden_size": 128, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.PixtralVisionConfig(**sizes, image_size=64, patch_size=4)
    found = calls(modeling, "apply_rotary_pos_emb")
    model = modeling.PixtralVisionModel(config)
    model(torch.randn(1, 3, 24, 40), image_sizes=torch.tensor([[24, 40]]))
    compare("pixtral", (x.transpose(1, 2) for x in found[0]), config, grid_positions(6, 10))


def test_llama4_vision_tower(calls: Any) -> None:
    modeling = import_module("transformers.models.llama4.modeling_llama4")
    config = transformers.AutoConfig.for_model("llama4_vision_model", hidden_size=128, num_attention_heads=4)
    for field, value in {"image_size": 84, "num_hidden_layers": 1, "intermediate_size": 512}.items():
        setattr(config, field, value)
    found = calls(modeling, "vision_apply_rotary_emb")
    modeling.Llama4VisionModel(config)(torch.randn(2, 3, 84, 84))
    compare("llama4_vision_model", found[0], config, llama4_positions(6))


def test_metas_own_weights() -> None:
    """The one line without a model in transformers."""
    q, k = torch.randn(BATCH, SEQLEN, 4, 64), torch.randn(BATCH, SEQLEN, 2, 64)
    theta = 5e5
    expected = reference.apply_rotary_emb(q, k, reference.precompute_freqs_cis(64, LENGTH, theta)[20 : 20 + SEQLEN])
    (family,) = (family for family in FAMILIES if not family.model_types)
    positions = torch.arange(20, 20 + SEQLEN)
    for out, want, x in zip(
        run_line(family, q, k, positions=positions, end=LENGTH, theta=theta), expected, (q, k), strict=True
    ):
        check(out, want, x, True)
