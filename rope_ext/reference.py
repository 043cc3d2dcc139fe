"""Eager references of the rotary embedding: the definition that tests, benchmarks and documentation compare with.

Two of them, on purpose, because they can be wrong only in different ways:

* Meta's functions (``precompute_freqs_cis``, ``reshape_for_broadcast``, ``apply_rotary_emb``), with the semantics of
  ``llama/model.py`` in https://github.com/meta-llama/llama: one complex multiplication in float32.
* the formula (``rotate``, ``apply`` and their ``_cos_sin`` forms, with the signatures of the operators): real
  arithmetic, one ATen operation and one rounding at a time, so that nothing can be fused into an FMA.

Both are plain differentiable ATen, run on any device and check nothing: their inputs are right by assumption.
"""

from __future__ import annotations

import torch
from torch import Tensor


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    """Meta's table: row ``m`` holds ``exp(i * m * theta ** (-2 * j / dim))``; complex64, shape ``(end, dim // 2)``."""
    exponent = torch.arange(0, dim, 2)[: dim // 2].float() / dim
    inv_freq = 1.0 / (theta**exponent)
    angle = torch.outer(torch.arange(end), inv_freq).float()
    return torch.polar(torch.ones_like(angle), angle)


def reshape_for_broadcast(freqs_cis: Tensor, x: Tensor) -> Tensor:
    """Views an ``(S, D/2)`` table as ``(1, S, 1, D/2)``, to be multiplied with a complex ``(B, S, H, D/2)``."""
    return freqs_cis.view([size if dim in (1, x.ndim - 1) else 1 for dim, size in enumerate(x.shape)])


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Meta's rotation of ``(B, S, H, D)`` queries and keys by an ``(S, D/2)`` complex64 table.

    Every input is computed in float32, float64 too. ATen's complex product is unfused where it runs vectorised, but its
    scalar tails (short rows, and the seams where it cuts a tensor between threads) may use an FMA: for bits that do not
    depend on the machine, run it on one thread and with D/2 a multiple of the vector width.
    """

    def one(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * reshape_for_broadcast(freqs_cis, pairs)).flatten(3).type_as(x)

    return one(xq), one(xk)


def rotate_cos_sin(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    conj: bool = False,
) -> Tensor:
    """The formula: ``(a + ib) * (c + is)`` for every pair ``(a, b)`` of the first ``rotary_dim`` features of a head.

    The arithmetic is float64 if ``x`` or the table is, else float32.
    """
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    wide = torch.float64 if torch.float64 in (x.dtype, cos.dtype) else torch.float32
    c, s = (table.to(wide).unsqueeze(-2) for table in (cos, sin))  # the heads of a token share its row
    s = -s if conj else s
    r = x.shape[-1] if rotary_dim is None else rotary_dim
    head = x[..., :r].contiguous().to(wide)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., : r // 2], head[..., r // 2 :])
    real, imag = a * c - b * s, a * s + b * c
    rotated = torch.stack((real, imag), -1).flatten(-2) if interleaved else torch.cat((real, imag), -1)
    if x.dtype in (torch.float16, torch.bfloat16):
        rotated = rotated.float()  # float64 reaches 16 bits through float32, as torch's own conversions do
    return torch.cat((rotated.to(x.dtype), x[..., r:]), -1)


def rotate(
    x: Tensor,
    freqs_cis: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    conj: bool = False,
) -> Tensor:
    """``rotate_cos_sin`` with the real and imaginary parts of a complex table, a lazily conjugated one included."""
    table = torch.view_as_real(freqs_cis.resolve_conj())
    return rotate_cos_sin(x, table[..., 0], table[..., 1], positions, interleaved, rotary_dim, conj)


def apply(
    xq: Tensor,
    xk: Tensor,
    freqs_cis: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    conj: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rotate`` of queries and keys."""
    options = (positions, interleaved, rotary_dim, conj)
    return rotate(xq, freqs_cis, *options), rotate(xk, freqs_cis, *options)


def apply_cos_sin(
    xq: Tensor,
    xk: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    conj: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rotate_cos_sin`` of queries and keys."""
    options = (positions, interleaved, rotary_dim, conj)
    return rotate_cos_sin(xq, cos, sin, *options), rotate_cos_sin(xk, cos, sin, *options)
