"""Strides are read, not repaired: every layout of x and of the tables, and the memory around them untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import (
    BF16,
    DISJOINT_LAYOUTS,
    F32,
    LAYOUTS,
    Case,
    Layout,
    each_case_or_expanded,
    each_dtype,
    each_pairing,
    place_pair,
    random_table,
    short,
)
from harness import assert_same, check, op
from rope_ext import reference


@each_case_or_expanded
def test_cases(case: Case, device: str) -> None:
    check(*case.make(device))


@each_dtype
@each_pairing
@pytest.mark.parametrize("head_dim", (10, 64, 80))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, head_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    table = random_table((3, head_dim // 2), device=device)
    check(*place_pair(layout, (2, 3, 5, head_dim), dtype, device), table, None, interleaved)
    check(*place_pair(layout, (3, 5, head_dim), dtype, device), table, None, interleaved)


def test_output_strides_are_those_of_empty_like(device: str) -> None:
    """`check` compares with empty_like everywhere; here are its answers for the two views that models make."""
    fused = torch.randn(2, 5, 12 * 64, device=device)
    q, k, _ = fused.view(2, 5, 12, 64).split((8, 2, 2), 2)
    assert q.stride() == (3840, 768, 64, 1)
    out, _ = check(q, k, random_table((5, 32), device=device))
    assert out.stride() == (2560, 512, 64, 1)
    heads_first = torch.randn(2, 3, 4, 8, device=device).transpose(1, 2)
    out = op("rotate")(heads_first, random_table((4, 4), device=device))
    assert out.stride() == (96, 8, 32, 1)


@each_dtype
@each_pairing
@pytest.mark.parametrize("start", (0, 33, 64, 128, 190, 192))
def test_slices_of_a_wider_head(start: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    wide = Layout("slice", pad={"d": 192}, offset=start)
    xs = [wide.place((2, 3, heads, 64), dtype, device) for heads in (5, 1)]
    check(*xs, random_table((3, 32), device=device), None, interleaved)


@each_dtype
@each_pairing
@pytest.mark.parametrize("head_dim", (4, 64, 80))
@pytest.mark.parametrize("offset", (1, 3, 5))
def test_odd_storage_offsets(offset: int, head_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    layout = Layout("offset", offset=offset)
    xs = [layout.place((2, 3, heads, head_dim), dtype, device) for heads in (5, 1)]
    check(*xs, random_table((3, head_dim // 2), device=device), None, interleaved)


@each_dtype
@pytest.mark.parametrize("stride", (0, 1, 3, 5, 7, 2**40))
@pytest.mark.parametrize("dim", range(3))
def test_strides_of_single_elements_are_ignored(dim: int, stride: int, dtype: torch.dtype, device: str) -> None:
    shape = [3, 2, 5, 24]
    shape[dim] = 1

    def with_stride(x: Tensor) -> Tensor:
        strides = list(x.stride())
        strides[dim] = stride
        return x.as_strided(x.shape, strides, x.storage_offset())

    k_heads = 1 if dim == 2 else 2
    pair = [with_stride(x) for x in place_pair("sliced", tuple(shape), dtype, device, k_heads)]
    check(*pair, random_table((shape[1], 12), device=device))


@each_dtype
def test_packed_single_heads(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(336 * 2 + 5, device=device).to(dtype)[3:-2].as_strided((336, 1, 2), (2, 1, 1), 3)
    check(x, x.clone(), random_table((336, 1), device=device))


@each_dtype
def test_slices_of_batch_and_sequence(dtype: torch.dtype, device: str) -> None:
    xq, xk = (x[1::2, 2:7] for x in place_pair("dense", (6, 9, 3, 64), dtype, device))
    check(xq, xk, random_table((5, 32), device=device))


@each_dtype
@each_pairing
def test_gaps_are_untouched(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    buffers = [torch.full((2 * 1000,), -3.0, device=device).to(dtype) for _ in range(2)]
    xs = [buffer.as_strided((2, 4, 7, 32), (1000, 224, 32, 1)) for buffer in buffers]
    for x in xs:
        x.copy_(torch.randn(x.shape))
    check(*xs, random_table((4, 16), device=device), None, interleaved)


TABLES: dict[str, Callable[[str], Tensor]] = {
    # (6, 32) tables, cut from other shapes
    "every-other-row": lambda device: torch.randn(12, 32, dtype=torch.complex64, device=device)[::2],
    "transposed": lambda device: torch.randn(32, 6, dtype=torch.complex64, device=device).t(),
    "one-row": lambda device: torch.randn(1, 32, dtype=torch.complex64, device=device).expand(6, 32),
    "one-column": lambda device: torch.randn(6, 1, dtype=torch.complex64, device=device).expand(6, 32),
    "every-other-column": lambda device: torch.randn(6, 64, dtype=torch.complex64, device=device)[:, ::2],
    "columns-5-to-37": lambda device: torch.randn(6, 40, dtype=torch.complex64, device=device)[:, 5:37],
    "conj-of-transposed": lambda device: torch.randn(32, 6, dtype=torch.complex64, device=device).t().conj(),
    "complex128-every-other-column": lambda device: torch.randn(6, 64, dtype=torch.complex128, device=device)[:, ::2],
    "odd-float-offset": lambda device: torch.view_as_complex(
        torch.randn(6 * 64 + 4, device=device)[2:-2].view(6, 32, 2)
    ),
}


@each_dtype
@each_pairing
@pytest.mark.parametrize("name", TABLES)
def test_strides_of_freqs_cis(name: str, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    check(*place_pair("head-range", (2, 6, 3, 64), dtype, device), TABLES[name](device), None, interleaved)


def cos_sin_views(device: str, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    cache = torch.randn(6, 64, device=device).to(dtype)
    other = torch.randn(32, 6, device=device).to(dtype)
    return {
        "halves-of-a-cache": (cache[:, :32], cache[:, 32:]),
        "columns-of-a-cache": (cache[:, 0::2], cache[:, 1::2]),
        "unlike-strides": (cache[:, 9:41], other.t()),
        "one-row-and-one-column": (cache[:1, :32].expand(6, 32), cache[:, :1].expand(6, 32)),
        "the-same-memory": (cache[:, 3:35], cache[:, 3:35]),
        "pairs-stacked-first": (other.view(2, 16, 6)[0].repeat(2, 1).t(), other.t()),
    }


@each_dtype
@each_pairing
@pytest.mark.parametrize("table_dtype", (F32, BF16), ids=short)
@pytest.mark.parametrize("name", cos_sin_views("cpu", F32))
def test_strides_of_cos_and_sin(
    name: str, table_dtype: torch.dtype, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    pair = place_pair("tokens-first", (2, 6, 3, 64), dtype, device)
    check(*pair, cos_sin_views(device, table_dtype)[name], None, interleaved)


@pytest.mark.parametrize("lazy", (False, True), ids=("", "conj"))
def test_the_table_is_never_copied(lazy: bool, device: str) -> None:
    """One row seen 2^40 times: whoever copies or even walks through the whole table does not come back."""
    row = torch.randn(1, 8, dtype=torch.complex64, device=device)
    table, row = (row.conj(), row.conj()) if lazy else (row, row)
    table = table.expand(2**40, 8)
    x = LAYOUTS["sliced"].place((2, 3, 5, 16), F32, device).requires_grad_()
    positions = torch.tensor([2**40 - 1, 0, 12345678901], device=device)
    expected = reference.rotate(x, row.expand(3, 8)).detach()
    assert_same(op("rotate")(x, table, positions).detach(), expected)
    out = op("rotate_cos_sin")(x, table.real, table.imag, positions)
    assert_same(out.detach(), expected)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert_same(grad, reference.rotate(torch.ones_like(out), row.expand(3, 8), conj=True))
    with torch.no_grad():
        op("rotate_")(x, table, positions)
    assert_same(x.detach(), expected)


@each_dtype
@each_pairing
def test_queries_and_keys_may_be_one_tensor(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    """Functional: two equal outputs in memories of their own, as `check` sees to; in place: refused."""
    x = LAYOUTS["sliced"].place((2, 3, 5, 24), dtype, device)
    check(x, x, random_table((3, 12), device=device), None, interleaved)


def test_every_layout_is_another_one() -> None:
    strides = {layout.place((2, 3, 5, 8), F32).stride() for layout in DISJOINT_LAYOUTS}
    offsets = {layout.place((2, 3, 5, 8), F32).storage_offset() for layout in DISJOINT_LAYOUTS}
    assert len(strides) == len(DISJOINT_LAYOUTS) - 2 and len(offsets) == 3
