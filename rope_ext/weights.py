"""Query and key projections from one pairing of features to the other.

Why Meta's and Hugging Face's checkpoints of one model differ
-------------------------------------------------------------
Rotation pairs up the features of a head. Meta's code pairs neighbours, Hugging Face's (and GPT-NeoX's) pairs the two
halves. R = 8, features that rotate together have the same letter::

    interleaved (Meta)         feature  0  1  2  3  4  5  6  7
                               pair     a  a  b  b  c  c  d  d

    half (Hugging Face)        feature  0  1  2  3  4  5  6  7
                               pair     a  b  c  d  a  b  c  d

The i-th pair turns equally fast in both, so the two are one model with its features listed in another order: the even
features of each head, then the odd ones::

    half feature               0  1  2  3  4  5  6  7
    is interleaved feature     0  2  4  6  1  3  5  7

A feature of q is one row of its projection's weight (and one number of its bias), so reordering rows once replaces
reordering features at every token. The score of q and k is a sum over features, and does not change when q and k are
reordered alike: both projections must be converted, with the rotation. Values never rotate: v and o stay as they are.

A checkpoint in the wrong order gives no error, only nonsense: it runs, and each position is encoded wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_ext.tables.params import integer


def interleaved_to_half(weight: Tensor, num_heads: int, *, rotary_dim: int | None = None) -> Tensor:
    """Meta's layout to Hugging Face's: use the result with ``interleaved=False``.

    Args:
        weight: of the query or key projection: weight ``(num_heads * head_dim, in_features)`` or bias
            ``(num_heads * head_dim,)``, any dtype; or any tensor whose first dimension runs over heads and features,
            such as the scale of a norm over one head (``num_heads=1``).
        num_heads: heads of this projection: for keys under grouped-query attention the number of key heads.
        rotary_dim: R, where only the first R features of each head rotate; None means all do. The others stay.

    Returns:
        A new tensor of the same shape and dtype; ``half_to_interleaved`` gives back exactly the input.

    Raises:
        ValueError: the first dimension is not ``num_heads`` heads of an even number of features, or R does not fit.
    """
    return _reorder(weight, num_heads, rotary_dim, to_half=True)


def half_to_interleaved(weight: Tensor, num_heads: int, *, rotary_dim: int | None = None) -> Tensor:
    """Hugging Face's layout to Meta's: use the result with ``interleaved=True``.

    Arguments and errors as for ``interleaved_to_half``, of which this is the exact inverse.
    """
    return _reorder(weight, num_heads, rotary_dim, to_half=False)


def _reorder(weight: Tensor, num_heads: int, rotary_dim: int | None, to_half: bool) -> Tensor:
    integer("num_heads", num_heads, least=1)
    if weight.dim() == 0 or weight.shape[0] % num_heads:
        raise ValueError(f"weight {tuple(weight.shape)}: the first dimension must be {num_heads} heads of equal size")
    head_dim = weight.shape[0] // num_heads
    rotated = integer("rotary_dim", head_dim if rotary_dim is None else rotary_dim, least=2)
    if rotated % 2 or rotated > head_dim:
        raise ValueError(f"rotary_dim must be even and at most head_dim = {head_dim}, got {rotated}")
    features = torch.arange(head_dim, device=weight.device)
    pairs = (-1, 2) if to_half else (2, -1)
    features[:rotated] = features[:rotated].view(pairs).t().flatten()
    return weight.reshape(num_heads, head_dim, *weight.shape[1:]).index_select(1, features).view(weight.shape)
