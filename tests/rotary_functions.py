"""What the tests of the transformers integration share: rotary functions, tables, and a count of operator calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# batch, tokens, query heads, key heads, head_dim
B, S, H, K, D = 2, 5, 3, 1, 12


def tables(columns: int, spread: str, dtype: torch.dtype, rows: int = S) -> tuple[Tensor, Tensor]:
    angle = 3 * torch.rand(B, rows, columns if spread == "single" else columns // 2)
    angle = {"single": angle, "halves": angle.repeat(1, 1, 2), "pairs": angle.repeat_interleave(2, -1)}[spread]
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Calls(TorchDispatchMode):
    """Counts the calls of the operators of rope_ext."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rope += func.namespace == "rope"
        return func(*args, **(kwargs or {}))


def count(call: Callable[[], Any]) -> tuple[Any, int]:
    with Calls() as calls:
        return call(), calls.rope


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def right(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def pairs_by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours turn by the angles of a table written by halves: no rotation, a mistake that has been published."""

    def one(x: Tensor) -> Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        c, s = (t.unsqueeze(1)[..., : t.shape[-1] // 2].repeat(1, 1, 1, 2) for t in (cos, sin))
        return x * c + turned * s

    return one(q), one(k)
