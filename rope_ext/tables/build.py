"""From hyperparameters to a table: positions times frequencies, once, on the CPU.

Three recipes share these lines:

* plain (``scaling`` None): Meta's bits, ``torch.polar`` of float32 angles.
* scaled (any rope dict): transformers' bits, ``cos`` and ``sin`` of float32 angles times the magnitude. On the CPU
  ``cos`` and ``polar`` differ in the last bit of one value in 25, so a dict takes this road even where its method
  changes nothing.
* exact: frequencies, products, cosines and sines in float64, rounded once. float32 angles are wrong by half a unit in
  the last place of a number the size of the position, and more: a cosine error of 2e-3 at position 32k, 6e-2 at 1M.

Tables are always computed on the CPU and then copied, since ``pow``, ``cos`` and ``sin`` differ in the last bit from
device to device; and always with elementwise products, which no TF32 or autocast setting touches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rope_ext.tables.params import RopeParams, integer
from rope_ext.tables.scaling import all_finite, frequencies

# float32 holds every integer up to here; rows past it would repeat their neighbour's angle.
MAX_FLOAT32_ROWS = 2**24 + 1


@contextmanager
def undisturbed() -> Iterator[None]:
    """No autocast, and no inference mode: a table made under it could never be saved for a backward pass."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float | None = None,
    *,
    scaling: Mapping[str, Any] | None = None,
    exact: bool = False,
    seq_len: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table of rotation factors ``m * exp(i * p * w)`` for positions ``p = 0 .. end-1``.

    Args:
        dim: number of rotated features, even: the head dim, or less for partial rotation (for ``proportional`` always
            the head dim). A ``partial_rotary_factor`` in ``scaling`` is not applied again.
        end: number of rows.
        theta: base of the frequencies; None takes ``scaling["rope_theta"]``, else 10000.
        scaling: a Hugging Face rope dict, ``rope_parameters`` or the older ``rope_scaling``: ``default``, ``linear``,
            ``dynamic``, ``yarn``, ``llama3``, ``longrope``, ``proportional`` or ``ntk_alpha``. None is a plain table.
            ``original_max_position_embeddings`` or ``max_position_embeddings``, where a method needs them, stand in
            this dict too (``from_config`` puts them there).
        exact: compute in float64 and round once: error at most 6e-8 at any position up to 2^20. Otherwise the bits of
            Meta's ``precompute_freqs_cis`` for plain tables and of transformers for scaled ones.
        seq_len: the length that ``dynamic`` and ``longrope`` scale for; None is ``end``.
        device: where the result goes. None is the CPU, whatever ``torch.set_default_device`` says.

    Returns:
        complex64, ``(end, dim/2)``; its bits do not depend on device, default dtype, autocast or ``end``.

    Raises:
        ValueError: unknown ``rope_type``, missing or inconsistent values, an odd ``dim``; names the field.
    """
    p = RopeParams(dim, theta, scaling)
    rows = integer("end", end, least=0)
    if rows > MAX_FLOAT32_ROWS and not exact:
        raise ValueError(f"end = {end}: positions past 2^24 have no float32 of their own, use exact=True")
    length = rows if seq_len is None else integer("seq_len", seq_len, least=0)
    with undisturbed():
        inv_freq, magnitude = frequencies(p, _dtype(exact), length)
        angles = torch.outer(torch.arange(rows, dtype=inv_freq.dtype, device="cpu"), inv_freq)
        if not all_finite(angles[-1:]):  # the largest
            raise ValueError(f"theta = {p.theta!r}: an angle of row {rows - 1} leaves the range of {angles.dtype}")
        plain = not (p.scaled or exact)
        table = torch.polar(torch.ones_like(angles), angles) if plain else torch.complex(*cos_sin(angles, magnitude))
        return table if device is None else table.to(device)


def inv_freq(
    dim: int,
    theta: float | None = None,
    *,
    scaling: Mapping[str, Any] | None = None,
    exact: bool = False,
    seq_len: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The frequencies ``w`` in radians per position, ``(dim/2,)``: float32, or float64 if ``exact``.

    Arguments and errors as for ``precompute_freqs_cis``; without ``seq_len`` the methods that depend on the length give
    what they give up to ``original_max_position_embeddings``.
    """
    with undisturbed():
        length = None if seq_len is None else integer("seq_len", seq_len, least=0)
        values, _ = frequencies(RopeParams(dim, theta, scaling), _dtype(exact), length)
        return values if device is None else values.to(device)


def attention_factor(dim: int, theta: float | None = None, *, scaling: Mapping[str, Any] | None = None) -> float:
    """The length ``m`` of every factor of the table: 1.0 but for ``yarn`` and ``longrope``."""
    with undisturbed():
        return frequencies(RopeParams(dim, theta, scaling), torch.float64, None)[1]


def cos_sin(angles: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """``m cos`` and ``m sin`` as float32, rounded once if ``angles`` is float64."""
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def _dtype(exact: bool) -> torch.dtype:
    return torch.float64 if exact else torch.float32
