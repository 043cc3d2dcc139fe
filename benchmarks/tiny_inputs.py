"""Inputs of one forward for a tiny model: tokens, pixels, patches with their grid, mel features or a waveform."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tiny_models import TOKENS, VOCAB

Inputs = dict[str, Any]


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def ids(config: Any, *shape: int) -> Tensor:
    """Token ids of the lower half of the vocabulary: the special tokens are above."""
    sizes = [vars(config).get(name) or VOCAB for name in ("vocab_size", "codebook_vocab_size")]
    return torch.randint(1, min(*sizes, VOCAB) // 2, shape, generator=torch.Generator().manual_seed(1))


def memory(config: Any) -> Inputs:
    """A frame's features and those of one remembered frame, (tokens, batch, channels), with four object pointers."""
    height, width = config.memory_attention_rope_feat_sizes
    side = getattr(config, "memory_attention_rope_k_sizes", (height, width))
    frame, remembered = (height * width, 1), (side[0] * side[1] + 4, 1)
    kept = config.memory_encoder_output_channels
    return {
        "current_vision_features": floats(*frame, config.memory_attention_hidden_size),
        "current_vision_position_embeddings": floats(*frame, config.memory_attention_hidden_size),
        "memory": floats(*remembered, kept),
        "memory_posision_embeddings": floats(*remembered, kept),
        "num_object_pointer_tokens": 4,
    }


# classes whose forward wants what no rule says
SPECIAL: dict[str, Callable[[Any], Inputs]] = {
    "ClvpModelForConditionalGeneration": lambda c: {
        "input_ids": ids(c.text_config, 2, TOKENS),
        "input_features": floats(2, 80, 64),
    },
    "DeepseekOcr2VisionEncoder": lambda c: {"inputs_embeds": floats(1, 144, c.hidden_size), "num_patches": 144},
    "DiaDecoder": lambda c: {
        "input_ids": ids(c, 2, TOKENS, c.num_channels),
        "encoder_hidden_states": floats(2, 7, c.cross_hidden_size),
    },
    "EdgeTamVideoMemoryAttention": lambda c: memory(c) | {"num_spatial_memory_tokens": 1},
    # what an untrained backbone makes of it has no more than the size that attention expects
    "EfficientLoFTRModel": lambda c: {"pixel_values": 1e7 * floats(1, 2, 3, 96, 128)},
    "IdeficsModel": lambda c: {
        "input_ids": ids(c, 2, TOKENS),
        "pixel_values": floats(2, 1, 3, c.vision_config.image_size, c.vision_config.image_size),
        "image_attention_mask": torch.ones(2, TOKENS, 1, dtype=torch.long),
    },
    "Inkling2VisionModel": lambda c: {
        "pixel_values": floats(64, 2 * c.patch_size, 2 * c.patch_size, 3),
        "image_grid_thw": torch.tensor([[1, 4, 8], [1, 8, 4]]),
    },
    "KyutaiSpeechToTextModel": lambda c: {"input_ids": ids(c, 2, TOKENS, c.num_codebooks + 1)},
    "LightGlueForKeypointMatching": lambda c: {"pixel_values": floats(1, 2, 1, 64, 96)},
    "MoonshineModel": lambda c: {"input_values": floats(1, 8000), "decoder_input_ids": ids(c, 1, TOKENS)},
    "MoonshineStreamingModel": lambda c: {"input_values": floats(1, 8000), "decoder_input_ids": ids(c, 1, TOKENS)},
    "MoshiDepthDecoder": lambda c: {
        "input_ids": ids(c, 2, c.num_codebooks),
        "last_hidden_state": floats(2, 1, c.input_size),
    },
    "MuseGlimmerAssistantModel": lambda c: {
        "noise_embeds": floats(1, 4, c.hidden_size),
        "context_hidden_states": floats(1, TOKENS, c.hidden_size * len(c.target_layer_ids)),
    },
    "MuseSparkAudioModel": lambda c: {"input_values": floats(1, 96 * 80)},
    "MusicFlamingoModel": lambda c: {
        "input_ids": torch.cat((ids(c, 1, 5), torch.full((1, 20), c.audio_token_id)), 1),
        "input_features": floats(1, c.audio_config.num_mel_bins, 80),
        "input_features_mask": torch.ones(1, 80, dtype=torch.long),
    },
    "NeuCodecModel": lambda c: {"input_values": floats(1, 1, 3200), "input_features": floats(1, 10, 160)},
    "Phi4MultimodalAudioModel": lambda c: {"hidden_states": floats(1, 64, c.input_size), "mask": torch.ones(1, 64)},
    "Sam2VideoMemoryAttention": memory,
    "Sam3TrackerVideoMemoryAttention": memory,
    "T5Gemma2Decoder": lambda c: {
        "input_ids": ids(c, 2, TOKENS),
        "encoder_hidden_states": floats(2, 7, c.hidden_size),
    },
    "TimesFm2_5Model": lambda c: {"past_values": floats(2, 4 * c.patch_length)},
    "Xcodec2Model": lambda c: {"input_values": floats(1, 1, 3200), "input_features": floats(1, 10, 160)},
}


def candidates(model: nn.Module) -> Iterator[Inputs]:
    """Inputs for ``model(**inputs)``, likeliest first: layouts of patches and features differ, no config names them."""
    config: Any = model.config
    values = vars(config)
    if type(model).__name__ in SPECIAL:
        yield SPECIAL[type(model).__name__](config)
        return
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = [p.name for p in named]
    first = next((p.name for p in named if p.default is p.empty), names[0])

    def number(*keys: str, default: int = 0) -> int:
        """The first of these fields that the configuration has; of a list its first entry."""
        value = next((values[k] for k in keys if values.get(k) is not None), default)
        return value if isinstance(value, int) else value[0]

    channels = number("num_channels", "in_channels", "in_chans", default=3)
    patch, steps = number("patch_size", default=16), number("temporal_patch_size", default=1)
    grid = next((n for n in names if n.endswith("grid_thw") and "video" not in n), None)
    if grid and first in ("hidden_states", "pixel_values"):
        sizes = torch.tensor([[1, 4, 8], [1, 8, 4]])  # two images
        n = int(sizes.prod(-1).sum())
        more = {"merge_sizes": torch.tensor([2, 2])} if "merge_sizes" in names else {}
        for shape in (
            (n, channels * steps * patch * patch),
            (n, channels, patch, patch),
            (n, channels * 2 * patch * patch),
            (1, n, channels, patch, patch),
            (n * patch * patch, channels * steps),
        ):
            yield {first: floats(*shape), grid: sizes, **more}
    elif first == "pixel_values_videos":
        side = number("image_size", "crop_size", default=64)
        yield {first: floats(1, number("frames_per_clip", default=4), channels, side, side)}
    elif first == "pixel_values":
        side = number("image_size", default=64)
        if "pixel_position_ids" in names:
            places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)[None]
            yield {first: floats(1, 36, channels * patch * patch), "pixel_position_ids": places}
        yield {first: floats(1, channels, side, side)}
        yield {first: floats(2, (side // patch) ** 2, channels * patch * patch)}
    elif first == "input_features":
        mel = number("num_mel_bins", "feature_size", "feature_projection_input_dim", "input_size", default=128)
        yield {first: floats(1, 64, mel)}
        yield {first: floats(1, mel, 64)}
    elif first == "input_values":
        yield {first: floats(1, 8000)}
        yield {first: floats(1, 1, 8000)}
    elif first == "latents":
        yield {first: floats(1, number("hidden_size"), 16)}
    elif first == "inputs_embeds" or "input_ids" not in names:
        yield {first: floats(2, TOKENS, number("hidden_size", "d_model"))}
    elif "decoder_input_ids" in names:
        yield {"input_ids": ids(config, 2, TOKENS), "decoder_input_ids": ids(config, 2, 7)}
    else:
        yield {"input_ids": ids(config, 2, TOKENS)}
        yield {"inputs_embeds": floats(2, TOKENS, number("hidden_size", "d_model", default=64))}
