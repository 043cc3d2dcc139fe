"""A tiny random model of every transformers architecture that rotates, with inputs for one forward, offline.

A configuration is its class's default with the counts cut by the rules of ``shrink``: heads, layers, experts, widths
and vocabulary. What the rotation sees stays the model's own: head_dim, rope parameters, sections, kinds of layers.
Where a default does not build, or would not rotate, ``OVERRIDES`` says what a checkpoint's config.json would.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

HEADS, LAYERS, VOCAB, TOKENS = 4, 2, 128, 12
MODELS = Path(transformers.__file__).parent / "models"
TOO_LARGE = 64_000_000  # parameters
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LAYERED = {"full_attention": DEFAULT, "sliding_attention": DEFAULT}

# fields a default configuration lacks, or has at values that the rules cannot cut alone, by class
OVERRIDES: dict[str, dict[str, Any]] = {
    "AudioFlamingo3EncoderConfig": {"max_source_positions": 40},
    "BambaConfig": {"attn_layer_indices": [1], "mamba_n_heads": 16},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5}},
    "CohereCompassTextConfig": {"rope_parameters": LAYERED},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "DoryConfig": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1},
    "EdgeTamVideoConfig": {"memory_attention_rope_feat_sizes": [8, 6]},
    # untrained, its full depth makes all tokens alike, and a rotation changes nothing
    "EfficientLoFTRConfig": {
        "stage_num_blocks": [1, 1, 1, 1],
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "EsmConfig": {"position_embedding_type": "rotary", "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "Gemma3nTextConfig": {"intermediate_size": 64},
    "Glm4vMoeTextConfig": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}, "head_dim": 128},
    "Glm4vTextConfig": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    "GlmImageTextConfig": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    "GradiumPhononTTSFlowHeadConfig": {"condition_dim": 256},
    "GraniteMoeHybridConfig": {
        "position_embedding_type": "rope",
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 16,
    },
    "HunYuanVLTextConfig": {"rope_parameters": {**DEFAULT, "mrope_section": [16, 16, 16, 16]}},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Llama4VisionConfig": {"intermediate_size": 768, "projector_input_dim": 64, "projector_output_dim": 64},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "NeuCodecConfig": {"quantization_dim": 512},
    "PocketTTSFlowHeadConfig": {"condition_dim": 256},
    "Qwen3OmniMoeTextConfig": {"head_dim": 128},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "Sam2VideoConfig": {"memory_attention_rope_feat_sizes": [8, 6]},
    "Sam3TrackerVideoConfig": {"image_size": 112},
    "Sapiens2Config": {"num_key_value_heads_per_layer": [4, 2]},
    "SeamlessM4TConfig": {"position_embeddings_type": "rotary"},
    "Step3p7TextConfig": {"sliding_window": 8},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "VJEPA2Config": {"crop_size": 32, "frames_per_clip": 4},
    "Wav2Vec2BertConfig": {"position_embeddings_type": "rotary"},
    "Wav2Vec2ConformerConfig": {"position_embeddings_type": "rotary"},
    "Xcodec2Config": {"quantization_dim": 512},
    "Zamba2Config": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "use_mem_rope": True},
}

# parts that are rotary but are not models of their own: class and that of its configuration
PARTS = {
    "edgetam_video": ("EdgeTamVideoMemoryAttention", "EdgeTamVideoConfig"),
    "sam2_video": ("Sam2VideoMemoryAttention", "Sam2VideoConfig"),
    "seamless_m4t": ("SeamlessM4TSpeechEncoder", "SeamlessM4TConfig"),
    "sam3_tracker_video": ("Sam3TrackerVideoMemoryAttention", "Sam3TrackerVideoConfig"),
}


def architectures() -> list[str]:
    """Names of transformers' model folders whose modelling file has a function that rotates, to judge by its name."""
    rotates = re.compile(r"def \w*(rotate_half|rotate_every_two|rotate_queries|rotary|apply_\w*rope)")
    paths = sorted(MODELS.glob("*/modeling_*.py"))
    return sorted({p.parent.name for p in paths if p.parent.name != "auto" and rotates.search(p.read_text())})


def towers(architecture: str) -> Iterator[tuple[type, type]]:
    """(model class, configuration class): one model for every configuration of a family, the plain ones first.

    A composite's towers are models of their own, so it comes last and only what they leave is to be sought in it.
    """
    by_config: dict[type, list[type]] = {}
    for path in sorted((MODELS / architecture).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{architecture}.{path.stem}")
        for cls in vars(module).values():
            if not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__):
                continue
            if inspect.isclass(cls.config_class) and "forward" in vars(cls):
                by_config.setdefault(cls.config_class, []).append(cls)
        if architecture in PARTS:
            name, config = PARTS[architecture]
            yield getattr(module, name), getattr(module, config)

    def headless(cls: type) -> tuple[bool, bool, int]:
        name = cls.__name__
        return not name.endswith("ForCausalLM"), bool(re.search(r"For[A-Z]", name)), len(name)

    for config_class, classes in sorted(by_config.items(), key=lambda item: bool(item[0].sub_configs)):
        yield min(classes, key=headless), config_class


HEAD_COUNT = r"(encoder_|decoder_)?(num_)?(attention_)?heads|n_heads?|.*num_attention_heads|linear_num_heads"
LAYER_COUNT = r"n_layers?|(encoder|decoder|num_encoder|num_decoder)_layers|.*num_(hidden_)?layers|depth|num_blocks"
WIDTH = r"hidden_size|d_model|n_embd|embed_dim|hidden_dim"


def stored(config: PreTrainedConfig) -> dict[str, Any]:
    """Its values, also under other names that its class has for them. Heterogeneous ones refuse getattr."""
    values = vars(config)
    return values | {name: values[other] for name, other in config.attribute_map.items() if other in values}


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields to change in it, by rules over their names."""
    values = stored(config)
    names = {f.name for f in fields(config)}

    def first(pattern: str) -> int | None:
        found = [n for n in names if re.fullmatch(pattern, n) and type(values.get(n)) is int]
        return values[min(found, key=len)] if found else None

    layers = first("num_hidden_layers") or first("n_layers?|num_layers|depth|encoder_layers") or 0
    heads = first("num_attention_heads|n_heads?|num_heads") or first("encoder_attention_heads|attention_heads")
    heads = heads or first("encoder_num_attention_heads")

    def per_layer(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == layers and layers > LAYERS

    kept = min(layers or LAYERS, LAYERS)
    for name, value in values.items():  # as many as show every kind of layer
        if per_layer(value) and name.endswith(("layer_types", "block_type", "no_rope_layers")):
            kept = max(kept, *(list(value).index(kind) + 1 for kind in value))

    token = VOCAB
    changes: dict[str, Any] = {}
    for name in sorted(names):
        old = values.get(name)
        new: Any = old
        if per_layer(old):
            new = type(old)(old[:kept])
        elif name == "head_dim" and old is None and heads:
            new = values["hidden_size"] // heads
        elif re.fullmatch(r"num_key_value_heads|.*_kv_heads", name):
            new = HEADS if old is None or old == heads else min(old, 2)
        elif name == "num_experts_per_tok":
            new = min(old or 2, 2)
        elif type(old) is not int:
            continue
        elif re.fullmatch(r".*token_(id|index)|im_.*_id", name):
            if old >= VOCAB:
                new = token = token - 1
        elif name == "num_kv_shared_layers":
            new = 0
        elif re.fullmatch(HEAD_COUNT, name):
            new = min(old, HEADS)
        elif re.fullmatch(r"linear_num_(key|value)_heads|mamba_num_heads", name):
            new = max(old // 8, 1)
        elif re.fullmatch(r".*key_value_heads", name):
            new = HEADS if old == heads else min(old, 2)
        elif re.fullmatch(LAYER_COUNT, name):
            new = kept if old == layers else min(old, LAYERS)
        elif re.fullmatch(WIDTH, name):
            new = old * min(heads, HEADS) // heads if heads else min(old, 64)
        elif re.fullmatch(r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|mlp_dim|intermediate_dim)", name):
            new = min(old, 64)
        elif re.fullmatch(r".*vocab_size(_per_layer_input)?|ngram_vocab_size_base", name):
            new = min(old, VOCAB)
        elif re.fullmatch(r"moe_k|moe_topk|top_k_experts|num_experts_per_token", name):
            new = min(old, 2)
        elif name in ("n_group", "topk_group", "num_expert_group", "n_groups"):
            new = 1
        elif re.fullmatch(r"(q|kv|o)_lora_rank|mamba_d_state|out_hidden_size|projection_dim|text_hidden_size", name):
            new = min(old, 64)
        elif re.fullmatch(r"n_routed_experts|num_local_experts|num_routed_experts|.*num_experts", name):
            new = min(old, 4)
        elif name in ("adapter_input_size", "adapter_in_dim", "upsample_groups"):
            new = values["hidden_size"] * min(heads or HEADS, HEADS) // (heads or HEADS)
        elif name == "image_size":
            patch = values.get("patch_size")
            new = min(old, 4 * (patch if isinstance(patch, int) else 16))
        if new != old:
            changes[name] = new
    return changes


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration, and of those within it, shrunk."""
    cls = type(config)
    default, values = stored(cls()), stored(config)
    kwargs = {f.name: values[f.name] for f in fields(config) if f.init and values.get(f.name) != default.get(f.name)}
    kwargs |= shrink(config) | OVERRIDES.get(cls.__name__, {})
    kwargs |= {name: tiny(value) for name, value in values.items() if isinstance(value, PreTrainedConfig)}
    return cls(**kwargs)


def build(model_class: type, config: PreTrainedConfig) -> torch.nn.Module:
    """The model in float32 and eval mode, with weights so large that attention is far from uniform.

    At their usual 0.02 a tiny model's scores are all but equal, and no rotation would be seen in its output.
    """
    config._attn_implementation = config._experts_implementation = "eager"  # no kernel with limits on sizes
    torch.manual_seed(0)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > TOO_LARGE:
        raise MemoryError(f"{count:,} parameters after shrinking")
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                fan_in = weight[0].numel() if weight.ndim == 2 or "conv" in name else weight.shape[-1]
                weight.normal_(0, 1 if "embed" in name and weight.ndim == 2 else fan_in**-0.5)
    return model
