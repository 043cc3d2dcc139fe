"""vLLM's rotary operator, on ours."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate ``query`` and ``key`` in place: the call of vLLM's ``torch.ops._C.rotary_embedding``.

    The arithmetic is float32 with one rounding at the end, whatever the dtype of the cache: what vLLM's kernel computes
    since it takes a cache of another dtype than the query, except that a compiler may contract its products to FMA. Its
    older kernels round every product to the dtype of the query. A cache cast to the query's dtype, as vLLM keeps it,
    costs more precision than either: pass it in float32.

    Where vLLM reads past the end of the cache, of a position that is too large or negative, this refuses.

    Args:
        positions: int32 or int64, ``(T,)`` or ``(B, S)``.
        query: ``(T, H * head_size)`` or ``(T, H, head_size)``, with positions ``(B, S)`` the same with (B, S) for T;
            any strides: a slice of a fused qkv buffer is written where it lies.
        key: the same, of its own number of heads; None rotates the query alone.
        head_size: features of a head.
        cos_sin_cache: ``(P, R)``, floating: R/2 cosines, then R/2 sines of each position; R <= head_size rotates the
            first R features of a head.
        is_neox: pairs are halves (True) or neighbours (False).
        rope_dim_offset: the first rotated feature of a head.
        inverse: rotate backwards.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as the operators: for shapes, dtypes, positions outside the
            cache, tensors that share memory or lie on different devices.

    Source: ``csrc/pos_encoding_kernels.cu`` in https://github.com/vllm-project/vllm
    """
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        raise ValueError(
            f"cos_sin_cache must have shape (rows, rotary_dim), cosines then sines, got {tuple(cos_sin_cache.shape)}"
        )
    rotary_dim = cos_sin_cache.shape[1]
    if head_size < 1 or rotary_dim < 2:
        raise ValueError(f"head_size = {head_size} and a cos_sin_cache of {rotary_dim} columns leave nothing to rotate")
    if not 0 <= rope_dim_offset <= head_size - rotary_dim:
        raise ValueError(
            f"{rotary_dim} rotated features from rope_dim_offset = {rope_dim_offset} do not fit head_size = {head_size}"
        )

    def rotated_part(x: Tensor, name: str) -> Tensor:
        if x.dim() == positions.dim() + 1 and x.shape[-1] % head_size == 0:
            x = x.view(*x.shape[:-1], x.shape[-1] // head_size, head_size)
        elif x.dim() != positions.dim() + 2 or x.shape[-1] != head_size:
            raise ValueError(
                f"{name} must have shape (*positions.shape, heads * {head_size}) or (*positions.shape, heads, "
                f"{head_size}), got {tuple(x.shape)} for positions {tuple(positions.shape)}"
            )
        return x[..., rope_dim_offset : rope_dim_offset + rotary_dim]

    cos, sin = cos_sin_cache.chunk(2, -1)
    options = (cos, sin, positions, not is_neox, None, inverse)
    xq = rotated_part(query, "query")
    if key is None:
        torch.ops.rope.rotate_cos_sin_.default(xq, *options)
    else:
        torch.ops.rope.apply_cos_sin_.default(xq, rotated_part(key, "key"), *options)
