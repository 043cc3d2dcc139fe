"""Tables over several position axes: time, row and column ids instead of one index.

Everything of this kind is an **axis map**: for each frequency, which axis its position is read from.

    angle[..., c] = positions[axis_map[c], ...] * inv_freq[c]

The frequencies never restart at an axis, unless a model says so (``axial_2d``). A text token has the same id on every
axis, which makes its row that of a table with one axis.

| model | frequencies | axis map | pairing of the operator |
| --- | --- | --- | --- |
| Qwen2-VL, Qwen2.5-VL | ``inv_freq`` | ``mrope_chunked([16, 24, 24])`` | halves |
| Qwen3-VL | ``inv_freq`` | ``mrope_interleaved([24, 20, 20])`` | halves |
| GLM-4V | ``inv_freq`` of the rotated part | ``mrope_chunked([8, 12, 12])`` | interleaved |
| ERNIE-4.5-VL | ``inv_freq`` | ``ernie([22, 22, 20])`` | interleaved |
| Qwen-VL vision tower | ``axial_2d`` | ``axial_2d``, on ``grid_positions`` | halves |
| Pixtral | ``pixtral_2d`` | ``pixtral_2d``, on ``grid_positions`` | halves |
| Llama 4 vision tower | ``axial_2d`` | ``axial_2d``, on ``llama4_positions`` | interleaved |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext.tables.build import cos_sin, inv_freq
from rope_ext.tables.params import integer


class Axes(NamedTuple):
    """Frequencies of all pairs, and the position axis that each pair reads."""

    #: ``(R/2,)``
    inv_freq: Tensor
    #: an axis index for each of them
    axis_map: tuple[int, ...]


def freqs_cis_at(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    axis_map: Sequence[int] | Tensor | None = None,
    attention_factor: float = 1.0,
) -> Tensor:
    """The rows of a table at any positions: no table needed, no limit on the ids.

    Args:
        positions: ids, integer: ``(S,)`` or ``(B, S)``; with an ``axis_map`` ``(axes, S)`` or ``(axes, B, S)``. With
            float32 frequencies, ids above 2^24 round to a neighbour.
        inv_freq: ``(R/2,)``, or ``(..., 1, R/2)`` where sequences differ; float32 has the bits of transformers,
            float64 is the exact recipe, rounded once.
        axis_map: one axis index for each of the R/2 frequencies.
        attention_factor: the magnitude of every factor.

    Returns:
        complex64, ``(S, R/2)`` or ``(B, S, R/2)``, on the device of ``positions``; the ``freqs_cis`` of the operators.

    Raises:
        ValueError: the map does not name one existing axis for each frequency.
    """
    return torch.complex(*cos_sin_at(positions, inv_freq, axis_map=axis_map, attention_factor=attention_factor))


def cos_sin_at(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    axis_map: Sequence[int] | Tensor | None = None,
    attention_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``freqs_cis_at`` as two float32 tensors, for the ``_cos_sin`` operators."""
    pairs = inv_freq.shape[-1]
    ids = positions.unsqueeze(-1) if axis_map is None else _ids_of_pairs(positions, pairs, axis_map)
    return cos_sin(ids.to(inv_freq.dtype) * inv_freq.to(positions.device), attention_factor)


def _ids_of_pairs(positions: Tensor, pairs: int, axis_map: Sequence[int] | Tensor) -> Tensor:
    """(axes, ...) -> (..., R/2): each pair's own id. A map given as a tensor is not read, which would stall a GPU."""
    if len(axis_map) != pairs:
        raise ValueError(f"axis_map names {len(axis_map)} pairs for {pairs} frequencies: sections must sum to dim/2")
    if not isinstance(axis_map, Tensor):
        if not all(0 <= axis < len(positions) for axis in axis_map):
            raise ValueError(f"axis_map holds axes {sorted(set(axis_map))}, positions {tuple(positions.shape)}")
        axis_map = torch.tensor(axis_map, device=positions.device)
    return positions.index_select(0, axis_map).movedim(0, -1)


def mrope_chunked(sections: Sequence[int]) -> tuple[int, ...]:
    """The first t pairs read the time, the next h the row, the last w the column. Qwen2-VL, Qwen2.5-VL, GLM-4V.

    Source: Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1; ``mrope_section`` of its config.
    """
    t, h, w = _three(sections)
    return (0,) * t + (1,) * h + (2,) * w


def mrope_interleaved(sections: Sequence[int]) -> tuple[int, ...]:
    """T H W T H W ... while there are rows and columns left, then T: every axis gets fast and slow pairs. Qwen3-VL.

    Sections (t, h, w). Source: ``modeling_qwen3_vl.py`` of transformers.
    """
    t, h, w = _three(sections)
    ends = {0: 0, 1: 3 * h, 2: 3 * w}
    axis_map = tuple(c % 3 if c < ends[c % 3] else 0 for c in range(t + h + w))
    if (axis_map.count(1), axis_map.count(2)) != (h, w):
        raise ValueError(f"sections {list(sections)} (time, row, column) cannot interleave: too few time pairs")
    return axis_map


def ernie(sections: Sequence[int]) -> tuple[int, ...]:
    """H W H W ... over the fast pairs, then T. ERNIE-4.5-VL; sections (h, w, t) with h = w.

    Source: ``modeling_ernie4_5_vl_moe.py`` of transformers.
    """
    h, w, t = _three(sections)
    if h != w:
        raise ValueError(f"sections {list(sections)} (row, column, time): row and column must be equal")
    return (1, 2) * h + (0,) * t


def _three(sections: Sequence[int]) -> list[int]:
    if len(sections) != 3:
        raise ValueError(f"sections must be three numbers, got {list(sections)}")
    return [integer("sections", section, least=0) for section in sections]


def axial_2d(dim: int, theta: float = 10000.0, *, exact: bool = False) -> Axes:
    """Half of the pairs turn with axis 0, half with axis 1, each half at w_j = theta^(-2j/(dim/2)), j < dim/4.

    The vision towers of Qwen2-VL to Qwen3-VL (axes row, column; halves) and of Llama 4 (axes x, y; interleaved).
    """
    w = inv_freq(_divisible_by_four(dim) // 2, theta, exact=exact)
    return Axes(torch.cat((w, w)), (0,) * len(w) + (1,) * len(w))


def pixtral_2d(dim: int, theta: float = 10000.0, *, exact: bool = False) -> Axes:
    """Rows turn at w_0, w_2, ..., columns at w_1, w_3, ... of theta^(-2i/dim). Pixtral; axes row, column; halves."""
    w = inv_freq(_divisible_by_four(dim), theta, exact=exact)
    return Axes(torch.cat((w[0::2], w[1::2])), (0,) * (len(w) // 2) + (1,) * (len(w) // 2))


def _divisible_by_four(dim: int) -> int:
    if integer("dim", dim, least=4) % 4:
        raise ValueError(f"dim must be divisible by 4, got {dim}: two axes, each of pairs")
    return dim


def grid_positions(height: int, width: int, *, merge_size: int = 1) -> Tensor:
    """Row and column ids of the patches of an image: int64, ``(2, height * width)``.

    Patches come row by row; with a ``merge_size`` (Qwen-VL) block by block of merge_size x merge_size patches, which
    the tower merges into one token later.
    """
    for name, value in (("height", height), ("width", width)):
        if integer(name, value, least=1) % integer("merge_size", merge_size, least=1):
            raise ValueError(f"{name} = {value} must be divisible by merge_size = {merge_size}")
    rows, columns = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
    grid = torch.stack((rows[:, None].expand(height, width), columns.expand(height, width)))
    blocks = grid.reshape(2, height // merge_size, merge_size, width // merge_size, merge_size)
    return blocks.transpose(2, 3).reshape(2, height * width)


def llama4_positions(size: int) -> Tensor:
    """x + 1 and y + 1 of size x size patches, row by row, then the class token, which does not rotate: (0, 0).

    Returns:
        int64, ``(2, size * size + 1)``.
    """
    y, x = grid_positions(size, size)
    return torch.nn.functional.pad(torch.stack((x, y)) + 1, (0, 1))
