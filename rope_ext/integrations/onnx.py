"""ONNX's RotaryEmbedding, on the operator."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    X: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """``RotaryEmbedding`` of ONNX opset 23, with the signature of ``torch.onnx.ops.rotary_embedding``.

    ONNX says nothing of roundings: its reference rounds every product of 16-bit tensors, this computes in float32 and
    rounds once. In float32 and float64 the bits are the same. The caches may have another dtype than X.

    Args:
        X: ``(B, H, S, D)``, or ``(B, S, H * D)`` with ``num_heads``; any strides.
        cos_cache, sin_cache: ``(P, R/2)`` with ``position_ids``, else a row for each token, ``(B, S, R/2)``.
        position_ids: int32 or int64, ``(B, S)``.
        interleaved: pairs are neighbours (True) or halves (False).
        num_heads: H, where the shape of X does not tell.
        rotary_embedding_dim: R, the first features of a head that rotate; 0: all of them.

    Returns:
        A tensor of X's shape; of its strides too, if X is dense.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as the operators; also a ``num_heads`` that X has not.

    Source: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html
    """
    options = (cos_cache, sin_cache, position_ids, bool(interleaved), rotary_embedding_dim or None)
    if X.dim() == 4:
        if num_heads not in (0, X.shape[1]):
            raise ValueError(f"num_heads = {num_heads}, but X is (batch, heads, seqlen, head_dim): {tuple(X.shape)}")
        return torch.ops.rope.rotate_cos_sin.default(X.transpose(1, 2), *options).transpose(1, 2)  # type: ignore[no-any-return]
    if X.dim() != 3 or num_heads < 1 or X.shape[-1] % num_heads:
        raise ValueError(
            f"X must have shape (batch, heads, seqlen, head_dim), or (batch, seqlen, heads * head_dim) with num_heads; "
            f"got {tuple(X.shape)} and num_heads = {num_heads}"
        )
    heads = X.view(*X.shape[:-1], num_heads, X.shape[-1] // num_heads)  # any strides: it only splits a dimension
    return torch.ops.rope.rotate_cos_sin.default(heads, *options).flatten(-2)  # type: ignore[no-any-return]
