"""Weights converted from one pairing to the other rotate to the same scores, and back to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rope_ext.tables import precompute_freqs_cis
from rope_ext.weights import half_to_interleaved, interleaved_to_half

B, S, WIDTH = 2, 5, 24


def scores(wq: Tensor, wk: Tensor, bq: Tensor, bk: Tensor, interleaved: bool, rotary_dim: int, head_dim: int) -> Tensor:
    """Attention scores of a small grouped-query layer: (B, heads, S, S)."""
    x = torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(5))
    q, k = (torch.nn.functional.linear(x, w, b).view(B, S, -1, head_dim) for w, b in ((wq, bq), (wk, bk)))
    table = precompute_freqs_cis(rotary_dim, S)
    q, k = torch.ops.rope.apply(q, k, table, None, interleaved, rotary_dim)
    return torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (12, 8), (10, 2), (64, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_scores_do_not_change(head_dim: int, rotary_dim: int, heads: int, kv_heads: int) -> None:
    wq, wk = torch.randn(heads * head_dim, WIDTH), torch.randn(kv_heads * head_dim, WIDTH)
    bq, bk = torch.randn(heads * head_dim), torch.randn(kv_heads * head_dim)
    meta = scores(wq, wk, bq, bk, True, rotary_dim, head_dim)

    converted = [interleaved_to_half(w, heads, rotary_dim=rotary_dim) for w in (wq, bq)]
    converted_k = [interleaved_to_half(w, kv_heads, rotary_dim=rotary_dim) for w in (wk, bk)]
    half = scores(converted[0], converted_k[0], converted[1], converted_k[1], False, rotary_dim, head_dim)
    assert torch.allclose(half, meta, rtol=1e-5, atol=1e-4)  # sums over features in another order
    if rotary_dim > 2:  # one pair is both neighbours and halves
        unconverted = scores(wq, wk, bq, bk, False, rotary_dim, head_dim)
        assert not torch.allclose(unconverted, meta, rtol=1e-2, atol=1e-2)


def test_the_order_is_the_one_in_the_picture() -> None:
    assert interleaved_to_half(torch.arange(8), 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert half_to_interleaved(torch.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleaved_to_half(torch.arange(10), 2, rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 7, 6, 8, 9]


def test_it_is_the_permutation_of_hugging_faces_conversion() -> None:
    """``permute`` of convert_llama_weights_to_hf.py, by what it does: (heads, D/2, 2, in) to (heads, 2, D/2, in)."""
    weight = torch.randn(4 * 16, WIDTH)
    permuted = weight.view(4, 8, 2, WIDTH).transpose(1, 2).reshape(64, WIDTH)
    assert torch.equal(interleaved_to_half(weight, 4), permuted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("rotary_dim", [None, 2, 6, 12])
@pytest.mark.parametrize("shape", [(36,), (36, 5), (36, 5, 2)])
def test_exact_inverses(dtype: torch.dtype, rotary_dim: int | None, shape: tuple[int, ...]) -> None:
    weight = torch.randint(-100, 100, shape).to(dtype)
    before = weight.clone()
    there = interleaved_to_half(weight, 3, rotary_dim=rotary_dim)
    assert there.dtype == dtype and there.shape == weight.shape
    assert torch.equal(half_to_interleaved(there, 3, rotary_dim=rotary_dim), weight)
    back = half_to_interleaved(weight, 3, rotary_dim=rotary_dim)
    assert torch.equal(interleaved_to_half(back, 3, rotary_dim=rotary_dim), weight)
    assert torch.equal(weight, before) and there.data_ptr() != weight.data_ptr()


def test_strided_weights() -> None:
    weight = torch.randn(WIDTH, 32).t()
    assert torch.equal(interleaved_to_half(weight, 2), interleaved_to_half(weight.contiguous(), 2))


@pytest.mark.parametrize(
    ("weight", "heads", "rotary_dim", "message"),
    [
        (torch.zeros(10, 4), 3, None, "3 heads"),
        (torch.zeros(()), 1, None, "heads"),
        (torch.zeros(15, 4), 3, None, "even"),
        (torch.zeros(16, 4), 2, 3, "even"),
        (torch.zeros(16, 4), 2, 10, "at most head_dim = 8"),
        (torch.zeros(16, 4), 2, 0, "rotary_dim"),
        (torch.zeros(16, 4), 0, None, "num_heads"),
    ],
)
def test_refusals(weight: Tensor, heads: int, rotary_dim: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interleaved_to_half(weight, heads, rotary_dim=rotary_dim)
