"""Rope dicts of every type, small enough that a few hundred rows reach past every length in them."""

from __future__ import annotations

from typing import Any

LENGTH = 1024  # max_position_embeddings of the scaled cases: tests ask for more and for fewer rows
ORIGINAL = 256


def spread(pairs: int, scale: float) -> list[float]:
    """One factor per pair, as LongRoPE's searched lists: uneven, growing."""
    return [1.0 + scale * (i / pairs) ** 1.5 for i in range(pairs)]


def scalings(dim: int) -> dict[str, dict[str, Any]]:
    """One or more rope dicts of every type."""
    inside = {"original_max_position_embeddings": ORIGINAL}
    lists = {"short_factor": spread(dim // 2, 0.3), "long_factor": spread(dim // 2, 9.0)}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **inside}
    yarn = {"rope_type": "yarn", "factor": 4.0, **inside}
    return {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "linear-below-1": {"rope_type": "linear", "factor": 0.5},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "dynamic-odd-factor": {"rope_type": "dynamic", "factor": 1.3},
        "dynamic-int-factor": {"rope_type": "dynamic", "factor": 3},
        "yarn": yarn,
        "yarn-no-truncate": {**yarn, "factor": 32.0, "truncate": False},
        "yarn-deepseek": {**yarn, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
        "yarn-mscale": {**yarn, "mscale": 0.707, "mscale_all_dim": 1.0},
        "yarn-mscale-all-dim-0": {**yarn, "mscale": 0.707, "mscale_all_dim": 0},
        "yarn-attention-factor": {**yarn, "attention_factor": 0.75},
        "yarn-no-factor": {**yarn, "factor": None},
        "yarn-beta-0": {**yarn, "beta_fast": 0, "beta_slow": 0},
        "yarn-equal-bounds": {**yarn, "original_max_position_embeddings": 6},
        "llama3": llama3,
        "llama3-narrow": {**llama3, "low_freq_factor": 3.9},
        "longrope": {"rope_type": "longrope", **inside, **lists},
        "longrope-factor": {"rope_type": "longrope", "factor": 32.0, **inside, **lists},
        "longrope-attention-factor": {"rope_type": "longrope", "attention_factor": 1.25, **inside, **lists},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "proportional-factor": {"rope_type": "proportional", "factor": 8.0, "partial_rotary_factor": 0.6},
    }
