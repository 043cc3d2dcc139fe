"""flash-attn's rotary function, on the operator."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    conjugate: bool = False,
) -> Tensor:
    """Rotate one tensor: the call of ``flash_attn.layers.rotary.apply_rotary_emb``, and ``conjugate`` of its kernel.

    The same arithmetic: float32, one rounding at the end; flash-attn's compiler contracts products to FMA, which is a
    rounding's difference. Unlike flash-attn, cos and sin need not have the dtype of x (float32 ones keep their
    precision), head_dim has no limit of 256, and a token past the end of the table is an error, where flash-attn leaves
    it unrotated.

    An offset in a tensor, or ``cu_seqlens``, means computing a position for every token at every call: a few small
    kernels. Where q, k and all layers share them, compute the positions once and call ``torch.ops.rope`` yourself.

    Args:
        x: ``(B, S, H, D)``; with ``cu_seqlens`` packed, ``(T, H, D)``.
        cos, sin: ``(P, R/2)``, floating, R <= D: a row for each position, at least as many as x needs.
        interleaved: pairs are neighbours (True) or halves (False).
        inplace: write into x and return it.
        seqlen_offsets: the position of each sequence's first token: one number, or int32 or int64 ``(B,)``.
        cu_seqlens: where packed sequences begin, and the end of the last: int32 or int64 ``(B + 1,)``, from 0, rising;
            its values are not checked, which would stop a GPU. Tokens past the end are padding, which flash-attn does
            not write; here they get row 0.
        max_seqlen: length of the longest packed sequence, to tell that the table is long enough without reading the
            device; optional here, and nothing else depends on it.
        conjugate: rotate backwards.

    Raises:
        ValueError: a table shorter than the sequence and its offset; other shapes, as the operators.
        TypeError, IndexError, RuntimeError: as the operators.

    Source: ``flash_attn/layers/rotary.py`` in https://github.com/Dao-AILab/flash-attention
    """
    if x.dim() != (4 if cu_seqlens is None else 3):
        expected = "(batch, seqlen, heads, head_dim)" if cu_seqlens is None else "(tokens, heads, head_dim)"
        raise ValueError(f"x must have shape {expected}, got {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos and sin must have one shape (rows, rotary_dim/2), got {(*cos.shape,)} and {(*sin.shape,)}"
        )
    seqlen = x.shape[1] if cu_seqlens is None else max_seqlen or 0
    first = 0 if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    if first < 0 or first + seqlen > len(cos):
        raise ValueError(f"cos and sin have {len(cos)} rows, for {seqlen} tokens from position {first}")

    positions = None
    if cu_seqlens is not None:
        positions = _packed_positions(x.shape[0], cu_seqlens, seqlen_offsets)
    elif isinstance(seqlen_offsets, Tensor):
        _check_offsets(seqlen_offsets, x.shape[0])
        positions = seqlen_offsets[:, None] + torch.arange(seqlen, device=x.device)
    else:
        cos, sin = cos[first : first + seqlen], sin[first : first + seqlen]
    options = (cos, sin, positions, interleaved, 2 * cos.shape[-1], conjugate)
    if inplace:
        torch.ops.rope.rotate_cos_sin_.default(x, *options)
        return x
    return torch.ops.rope.rotate_cos_sin.default(x, *options)  # type: ignore[no-any-return]


def _packed_positions(tokens: int, cu_seqlens: Tensor, offsets: int | Tensor) -> Tensor:
    """The position of every token in its own sequence, ``(tokens,)``, found without reading a value on the host."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)  # past the last one for padding
    if isinstance(offsets, Tensor):
        _check_offsets(offsets, len(cu_seqlens) - 1)
        offsets = torch.nn.functional.pad(offsets, (0, 1))[sequence]
    return (token - cu_seqlens[sequence] + offsets) * (token < cu_seqlens[-1])


def _check_offsets(offsets: Tensor, batch: int) -> None:
    if tuple(offsets.shape) != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"seqlen_offsets must be an int, or int32 or int64 of shape ({batch},), one per sequence; got "
            f"{offsets.dtype} {tuple(offsets.shape)}"
        )
