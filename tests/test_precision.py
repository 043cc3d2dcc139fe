"""Which roundings happen: bit equality with Meta's code and with the formula, mixed dtypes, float64, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch

from cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    HEAD_DIMS,
    LAYOUTS,
    META_DIMS,
    each_dtype,
    each_pairing,
    place_pair,
    random_table,
    short,
    unit_table,
)
from harness import assert_same, check, op
from rope_ext import reference

each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
meta_dtype = pytest.mark.parametrize("dtype", (F32, F16, BF16), ids=short)


@meta_dtype
@pytest.mark.parametrize("layout", ("dense", "head-range", "heads-first"))
@pytest.mark.parametrize("head_dim", META_DIMS)
def test_equal_to_meta(head_dim: int, layout: str, dtype: torch.dtype, device: str) -> None:
    torch.set_num_threads(1)  # Meta's own bits depend on where ATen cuts the tensor between threads
    for batch, seqlen, q_heads, k_heads in ((1, 64, 8, 2), (2, 9, 3, 1), (3, 1, 4, 4), (1, 301, 5, 1)):
        xs = place_pair(layout, (batch, seqlen, q_heads, head_dim), dtype, device, k_heads)
        table = unit_table(head_dim, 11, seqlen)
        meta = reference.apply_rotary_emb(*(x.cpu().clone(memory_format=torch.contiguous_format) for x in xs), table)
        for out, want in zip(op("apply")(*xs, table.to(device)), meta, strict=True):
            assert_same(out.cpu(), want, f"{batch, seqlen, q_heads, k_heads}")


@meta_dtype
@each_head_dim
def test_close_to_meta_at_every_head_dim(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Where Meta's code runs in scalar tails its products are fused: one rounding of a product may differ."""
    x = LAYOUTS["sliced"].place((2, 9, 3, head_dim), dtype, device)
    table = unit_table(head_dim, 11, 9)
    meta, _ = reference.apply_rotary_emb(x.cpu().contiguous(), x.cpu().contiguous(), table)
    out = op("rotate")(x, table.to(device)).cpu()
    sizes = x.cpu().double().abs().unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(-1, -1, -1, -1, 2).flatten(-2)
    bound = 2**-23 * sizes + torch.finfo(dtype).eps * meta.double().abs()
    assert ((out.double() - meta.double()).abs() <= bound).all()


@each_dtype
@each_pairing
@each_head_dim
def test_equal_to_the_formula(head_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    pair = place_pair("dense-at-1", (2, 3, 5, head_dim), dtype, device)
    check(*pair, random_table((3, head_dim // 2), device=device), None, interleaved)


@each_pairing
@pytest.mark.parametrize("dtype", (F16, BF16), ids=short)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    """Against float64: half an ulp of the output dtype, and what float32 arithmetic adds to it."""
    pair = place_pair("sliced", (2, 9, 3, 130), dtype, device)
    table = random_table((9, 65), device=device)
    exact = reference.rotate(pair[0].double(), table, None, interleaved)
    out, _ = check(*pair, table, None, interleaved)
    arithmetic = 2**-22 * pair[0].double().abs().max() * table.abs().max()
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + arithmetic).all()


TABLE_DTYPES = (torch.complex64, torch.complex128, *DTYPES)


@each_dtype
@each_pairing
@pytest.mark.parametrize("table_dtype", TABLE_DTYPES, ids=short)
def test_table_dtypes(table_dtype: torch.dtype, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    pair = place_pair("gaps", (2, 5, 3, 48), dtype, device)
    check(*pair, random_table((5, 24), table_dtype, device), None, interleaved)


@pytest.mark.parametrize("table_dtype", TABLE_DTYPES, ids=short)
def test_float64_arithmetic_is_not_float32_in_disguise(table_dtype: torch.dtype, device: str) -> None:
    x = LAYOUTS["dense-at-1"].place((2, 5, 3, 48), F64, device)
    table = random_table((5, 24), table_dtype, device)
    c, s = (table.real, table.imag) if table_dtype.is_complex else table
    out = op("rotate_cos_sin")(x, c, s)
    pairs = torch.complex(x[..., 0::2], x[..., 1::2])
    exact = torch.view_as_real(pairs * torch.complex(c.double(), s.double())[:, None]).flatten(-2)
    assert (out - exact).abs().max() < 1e-14


@pytest.mark.parametrize(("dtype", "bits"), ((F16, 11), (BF16, 8)), ids=("fp16", "bf16"))
def test_float64_reaches_sixteen_bits_through_float32(dtype: torch.dtype, bits: int, device: str) -> None:
    """As torch's own conversions: a number just above a tie is rounded to the tie first, then to even."""
    x = torch.tensor([1.0, 0.0], dtype=dtype, device=device).view(1, 1, 1, 2)
    just_above = torch.tensor([[1 + 2.0**-bits + 2.0**-40]], dtype=torch.complex128, device=device)
    out, _ = check(x, x + 1, just_above)
    assert out.flatten().tolist() == [1.0, 0.0]


@each_pairing
@pytest.mark.parametrize(("q_dtype", "k_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=short)
def test_queries_and_keys_of_two_dtypes(
    q_dtype: torch.dtype, k_dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    xq = LAYOUTS["sliced"].place((2, 5, 3, 66), q_dtype, device)
    xk = LAYOUTS["head-range"].place((2, 5, 1, 66), k_dtype, device)
    q, k = check(xq, xk, random_table((5, 33), device=device), None, interleaved)
    assert (q.dtype, k.dtype) == (q_dtype, k_dtype)


@each_pairing
@pytest.mark.parametrize("conj", (False, True), ids=("", "conj"))
@each_dtype
def test_one_complex_table_or_two_real_ones(dtype: torch.dtype, conj: bool, interleaved: bool, device: str) -> None:
    pair = place_pair("heads-first", (2, 5, 3, 80), dtype, device)
    table = random_table((5, 40), device=device)
    options = (None, interleaved, None, conj)
    complex_form = op("apply")(*pair, table, *options)
    real_form = op("apply_cos_sin")(*pair, table.real, table.imag, *options)
    for a, b in zip(complex_form, real_form, strict=True):
        assert_same(a, b)


@each_dtype
@each_pairing
@pytest.mark.parametrize("autocast_dtype", (BF16, F16), ids=short)
def test_autocast_leaves_the_op_alone(
    autocast_dtype: torch.dtype, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    pair = place_pair("sliced", (2, 5, 3, 24), dtype, device)
    table = random_table((5, 12), device=device)
    outside = reference.apply(*pair, table, None, interleaved)
    with torch.autocast(device, autocast_dtype):
        assert torch.get_autocast_dtype(device) == autocast_dtype
        inside = op("apply")(*pair, table, None, interleaved)
        with_leaf = op("rotate")(pair[0].clone().requires_grad_(), table, None, interleaved)
        op("apply_")(*pair, table, None, interleaved)
    for a, b, c in zip(outside, inside, pair, strict=True):
        assert_same(b, a)
        assert_same(c, a)
    assert_same(with_leaf.detach(), outside[0])


@each_pairing
def test_bf16_tells_far_positions_apart(interleaved: bool, device: str) -> None:
    x = torch.ones(1, 5, 1, 128, dtype=BF16, device=device)
    out, _ = check(x, x.expand(1, 5, 3, 128).clone(), unit_table(128, 65536, 5).to(device), None, interleaved)
    assert len({tuple(row.flatten().tolist()) for row in out[0]}) == 5
