"""Tables of rotation factors for every rotary model: plain, scaled, and over several position axes.

A table is all that distinguishes one rotary model from another, besides the pairing of features: see
``precompute_freqs_cis`` for one position axis, ``freqs_cis_at`` for several, ``from_config`` for a whole model.
"""

from rope_ext.tables.axes import (
    Axes,
    axial_2d,
    cos_sin_at,
    ernie,
    freqs_cis_at,
    grid_positions,
    llama4_positions,
    mrope_chunked,
    mrope_interleaved,
    pixtral_2d,
)
from rope_ext.tables.build import attention_factor, inv_freq, precompute_freqs_cis
from rope_ext.tables.config import from_config, layer_types, rope_arguments
from rope_ext.tables.scaling import yarn_mscale

__all__ = [
    "Axes",
    "attention_factor",
    "axial_2d",
    "cos_sin_at",
    "ernie",
    "freqs_cis_at",
    "from_config",
    "grid_positions",
    "inv_freq",
    "layer_types",
    "llama4_positions",
    "mrope_chunked",
    "mrope_interleaved",
    "pixtral_2d",
    "precompute_freqs_cis",
    "rope_arguments",
    "yarn_mscale",
]
