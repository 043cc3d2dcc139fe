"""Sizes: none, one, many, packed, partly rotated, and offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from cases import BF16, F32, HEAD_DIMS, LAYOUTS, each_dtype, each_pairing, place_pair, random_rows, random_table
from harness import assert_same, check, op
from rope_ext import reference

EMPTY = {
    # the shape of q, and the row form
    "no-batch": ((0, 4, 2, 8), "rows"),
    "no-tokens": ((2, 0, 3, 8), "rows"),
    "no-heads": ((2, 4, 0, 8), "rows"),
    "nothing": ((0, 0, 0, 8), "rows"),
    "packed": ((0, 2, 8), "rows"),
    "packed-ids": ((0, 2, 8), "ids"),
    "no-batch-ids-by-sample": ((0, 3, 2, 8), "ids-by-sample"),
    "no-batch-rows-by-sample": ((0, 3, 2, 8), "rows-by-sample"),
    "no-tokens-ids": ((2, 0, 3, 8), "ids"),
}


@each_dtype
@each_pairing
@pytest.mark.parametrize("layout", ("dense", "sliced", "heads-first"))
@pytest.mark.parametrize("name", EMPTY)
def test_empty(name: str, layout: str, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    shape, rows = EMPTY[name]
    table, positions = random_rows(rows, shape, 4, device=device)
    pair = place_pair(layout, shape, dtype, device, k_heads=shape[-2])
    q, k = check(*pair, table, positions, interleaved)
    assert q.shape == k.shape == shape


@each_dtype
@each_pairing
@pytest.mark.parametrize(("q_heads", "k_heads"), ((0, 3), (3, 0)))
def test_no_heads_beside_a_partner(
    q_heads: int, k_heads: int, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    pair = place_pair("head-range", (2, 4, q_heads, 8), dtype, device, k_heads)
    rotated = check(*pair, random_table((4, 4), device=device), None, interleaved)
    partner = 0 if q_heads else 1
    assert not rotated[partner].equal(pair[partner])


@each_dtype
@each_pairing
@pytest.mark.parametrize("rotary_dim", (2, 24, 32, 40, 48, 64))
@pytest.mark.parametrize("head_dim", (64, 80, 96, 128))
def test_rotary_dim(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    pair = place_pair("sliced", (2, 3, 5, head_dim), dtype, device)
    table = random_table((3, rotary_dim // 2), device=device)
    out = check(*pair, table, None, interleaved, rotary_dim)
    for x, y in zip(pair, out, strict=True):
        assert_same(y[..., rotary_dim:], x[..., rotary_dim:])
        assert_same(y[..., :rotary_dim], reference.rotate(x[..., :rotary_dim], table, None, interleaved))


@each_dtype
@each_pairing
def test_features_that_do_not_rotate_keep_their_bits(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    """Subnormals, signed zeros and the payload of a NaN too: they are moved, not computed."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (2, 3, 5, 40), dtype=bits, device=device)
    x = patterns.view(dtype)
    table = random_table((3, 12), device=device)
    out = op("rotate")(x, table, None, interleaved, 24)
    assert torch.equal(out.view(bits)[..., 24:], patterns[..., 24:])
    unrotated = patterns[..., 24:].clone()
    op("rotate_")(x, table, None, interleaved, 24)
    assert torch.equal(x.view(bits)[..., 24:], unrotated)


@each_dtype
@each_pairing
def test_rotary_dim_of_the_whole_head(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    pair = place_pair("heads-first", (2, 3, 5, 80), dtype, device)
    table = random_table((3, 40), device=device)
    whole = check(*pair, table, None, interleaved, 80)
    for a, b in zip(check(*pair, table, None, interleaved), whole, strict=True):
        assert_same(a, b)


@each_dtype
@each_pairing
@pytest.mark.parametrize("shape", ((1, 70001, 1, 8), (70001, 1, 1, 8), (1, 1, 70001, 8), (3, 700, 11, 66)))
def test_long_dimensions(shape: tuple[int, ...], interleaved: bool, dtype: torch.dtype, device: str) -> None:
    x = LAYOUTS["dense-at-1"].place(shape, dtype, device)
    table = random_table((shape[1], shape[-1] // 2), device=device)
    expected = reference.rotate(x, table, None, interleaved)
    assert_same(op("rotate")(x, table, None, interleaved), expected)
    op("rotate_")(x, table, None, interleaved)
    assert_same(x, expected)


@each_dtype
@each_pairing
@pytest.mark.parametrize("layout", ("sliced", "heads-first"))
@pytest.mark.parametrize("shape", ((2, 1031, 33, 128), (1, 2101, 65, 66)))
def test_outputs_larger_than_the_caches(
    shape: tuple[int, ...], layout: str, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    """At least 16 MiB, which a kernel may store in other ways than small ones."""
    x = LAYOUTS[layout].place(shape, dtype, device)
    assert x.nbytes >= 2**24
    table = random_table((shape[1], shape[-1] // 2), device=device)
    out = op("rotate")(x, table, None, interleaved)
    assert out.stride() == torch.empty_like(x).stride()
    assert_same(out, reference.rotate(x, table, None, interleaved))


@each_dtype
@each_pairing
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nothing_beyond_the_tensor_changes(head_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    """The pad of each head is one number, so a store that is a lane too wide lands on it."""
    buffer = torch.full((2, 3, 5, head_dim + 1), -3.0, device=device).to(dtype)
    x = buffer[:, 1:, 2:4, :head_dim]
    x.copy_(torch.randn(x.shape))
    table = random_table((2, head_dim // 2), device=device)
    expected = reference.rotate(x, table, None, interleaved)
    op("rotate_")(x, table, None, interleaved)
    assert_same(x.contiguous(), expected)
    x.fill_(-3.0)
    assert (buffer == -3.0).all()


@pytest.mark.parametrize("interleaved", (True, False))
def test_strides_beyond_32_bits(interleaved: bool) -> None:
    """Only the touched pages of the 4 GiB buffer exist."""
    buffer = torch.empty(2**31 + 128, dtype=BF16)
    x = buffer.as_strided((2, 1, 1, 128), (2**31, 128, 128, 1))
    x.copy_(torch.randn(2, 1, 1, 128))
    table = random_table((1, 64))
    expected = reference.rotate(x, table, None, interleaved)
    assert_same(op("rotate")(x, table, None, interleaved), expected)
    op("rotate_")(x, table, None, interleaved)
    assert_same(x.clone(), expected)


def test_positions_and_tables_beyond_32_bits() -> None:
    """A row whose offset in the table does not fit 32 bits, reached through an id."""
    table = torch.empty(2**31 + 64, dtype=torch.complex64).as_strided((3, 4), (2**30, 1))
    table.copy_(torch.randn(3, 4, dtype=torch.complex64))
    x = torch.randn(1, 2, 1, 8, dtype=F32)
    positions = torch.tensor([2, 0])
    assert_same(op("rotate")(x, table, positions), reference.rotate(x, table.clone(), positions))
