"""Which table row a token uses, and that nothing else of the batch decides its bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import (
    BF16,
    F32,
    F64,
    LAYOUTS,
    PACKED_ROW_FORMS,
    ROW_FORMS,
    each_dtype,
    each_pairing,
    place_pair,
    random_rows,
    random_table,
    short,
    unit_table,
)
from harness import assert_same, check, op, snapshot, twins
from rope_ext import reference


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2, 5, 3), rows) for rows in ROW_FORMS] + [((5, 3), rows) for rows in PACKED_ROW_FORMS],
    ids=[*ROW_FORMS, *(f"packed-{rows}" for rows in PACKED_ROW_FORMS)],
)
@each_dtype
def test_every_combination(dtype: torch.dtype, shape: tuple[int, ...], rows: str, device: str) -> None:
    table_dtypes = (torch.complex64, torch.complex128, BF16)
    dims = ((24, None), (40, 24))
    for interleaved, conj, (head_dim, rotary_dim), table_dtype in itertools.product(
        (True, False), (False, True), dims, table_dtypes
    ):
        pair = place_pair("sliced", (*shape, head_dim), dtype, device, k_heads=1)
        table, positions = random_rows(rows, (*shape, head_dim), 12, table_dtype, device)
        check(*pair, table, positions, interleaved, rotary_dim, conj)


@each_pairing
@each_dtype
@pytest.mark.parametrize("head_dim", (6, 80, 128))
def test_prefill_equals_decode(head_dim: int, dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("head-range", (2, 9, 5, head_dim), dtype, device)
    table = unit_table(head_dim, 0, 12).to(device)
    whole = op("apply")(*pair, table[3:12], None, interleaved)
    for i in range(9):
        step = op("apply")(*(x[:, i : i + 1] for x in pair), table[3 + i : 4 + i], None, interleaved)
        for a, b in zip(step, whole, strict=True):
            assert_same(a, b[:, i : i + 1], f"step {i}")


@each_pairing
@each_dtype
@pytest.mark.parametrize("head_dim", (6, 80))
def test_neighbours_in_the_batch_do_not_matter(
    head_dim: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    pair = place_pair("sliced", (7, 3, 5, head_dim), dtype, device)
    table = random_table((3, head_dim // 2), device=device)
    whole = check(*pair, table, None, interleaved)
    for x, out in zip(pair, whole, strict=True):
        for b in range(7):
            assert_same(op("rotate")(x[b : b + 1], table, None, interleaved), out[b : b + 1], f"sample {b}")
        for h in range(x.shape[2]):
            one = x[:, :, h : h + 1]
            assert_same(op("rotate")(one, table, None, interleaved), out[:, :, h : h + 1], f"head {h}")


@each_pairing
@each_dtype
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype, interleaved: bool) -> None:
    x = LAYOUTS["gaps"].place((2, 301, 33, 80), dtype)
    table = random_table((301, 40))
    expected = reference.rotate(x, table, None, interleaved)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert_same(op("rotate")(x, table, None, interleaved), expected, f"{threads} threads")
        (fresh,) = twins([x])
        op("rotate_")(fresh, table, None, interleaved)
        assert_same(fresh, expected, f"{threads} threads, in place")


@each_pairing
@each_dtype
def test_a_table_per_sample(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("heads-first", (2, 3, 5, 48), dtype, device)
    table = unit_table(48, 0, 8).to(device)
    both = torch.stack((table[0:3], table[5:8]))
    whole = check(*pair, both, None, interleaved)
    check(*pair, (both.real.to(dtype), both.imag.to(dtype)), None, interleaved)
    for x, out in zip(pair, whole, strict=True):
        assert_same(op("rotate")(x[1:], table[5:8], None, interleaved), out[1:])


@each_pairing
@each_dtype
def test_one_token_of_two_samples_with_their_own_rows(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("sliced", (2, 1, 3, 48), dtype, device)
    table = unit_table(48, 0, 8).to(device)
    q, k = check(*pair, table[[5, 3]][:, None], None, interleaved)
    assert (q.shape, k.shape) == (pair[0].shape, pair[1].shape)
    assert_same(q[1:], op("rotate")(pair[0][1:], table[3:4], None, interleaved))


@each_pairing
@each_dtype
def test_a_slice_of_the_table(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("dense", (2, 6, 3, 48), dtype, device)
    table = unit_table(48, 0, 31).to(device)
    part = table[17:23]
    assert part.storage_offset() > 0
    out = check(*pair, part, None, interleaved)
    for a, b in zip(out, op("apply")(*pair, part.clone(), None, interleaved), strict=True):
        assert_same(a, b)


POSITIONS = {
    # ids, and the shape of the queries they belong to
    "shared": ((7, 8, 9, 49, 0, 7), (2, 6, 3, 48)),
    "shared-leading-1": (((7, 8, 9, 49, 0, 7),), (2, 6, 3, 48)),
    "left-padded": (((0, 0, 0, 1, 2), (0, 1, 2, 3, 4)), (2, 5, 3, 48)),
    "packed": ((0, 1, 2, 0, 1, 40, 0), (7, 3, 48)),
}


@each_pairing
@each_dtype
@pytest.mark.parametrize("ids", (torch.int32, torch.int64), ids=short)
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_gather_rows(name: str, ids: torch.dtype, dtype: torch.dtype, interleaved: bool, device: str) -> None:
    values, shape = POSITIONS[name]
    positions = torch.tensor(values, dtype=ids, device=device)
    pair = place_pair("sliced", shape, dtype, device)
    table = random_table((50, 24), device=device)
    out = check(*pair, table, positions, interleaved)
    for a, b in zip(out, op("apply")(*pair, table[positions], None, interleaved), strict=True):
        assert_same(a, b)


@each_pairing
def test_left_padding_equals_a_fresh_start(interleaved: bool, device: str) -> None:
    x, _ = place_pair("sliced", (2, 5, 3, 48), F32, device)
    table = unit_table(48, 0, 50).to(device)
    out = op("rotate")(x, table, torch.tensor(POSITIONS["left-padded"][0], device=device), interleaved)
    assert_same(out[:1, 2:], op("rotate")(x[:1, 2:], table[:3], None, interleaved))


@each_pairing
@each_dtype
def test_packed_tokens_equal_a_batch_of_one(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    table = random_table((50, 24), device=device)
    positions = torch.tensor(POSITIONS["packed"][0], device=device)
    for layout in ("dense", "heads-first"):
        pair = place_pair(layout, (7, 3, 48), dtype, device)
        for rows in ((table, positions), (table[:7], None)):
            packed = check(*pair, *rows, interleaved)
            batched = op("apply")(*(x[None] for x in pair), *rows, interleaved)
            for a, b in zip(packed, batched, strict=True):
                assert_same(a, b[0])


def strided_positions(device: str) -> dict[str, Tensor]:
    ids = torch.arange(200, dtype=torch.int32, device=device) % 11
    return {
        "stepped": ids[1:151:5].view(2, 3, 5)[:, 0],
        "transposed": ids[3:13].view(5, 2).t(),
        "one-sample": ids[3:8].expand(2, 5),
        "one-number": ids[4:5].expand(2, 5),
        "offset": ids[7:27].view(2, 10)[:, 3:8],
    }


@pytest.mark.parametrize("name", strided_positions("cpu"))
@each_dtype
def test_strides_of_positions(name: str, dtype: torch.dtype, device: str) -> None:
    pair = place_pair("dense", (2, 5, 3, 16), dtype, device)
    check(*pair, random_table((11, 8), device=device), strided_positions(device)[name])


OUT_OF_RANGE = {
    # ids for 11 rows, and what the message must name
    "past-the-end": (torch.tensor([0, 1, 11, 2]), ("11", "2", "11 rows")),
    "negative": (torch.tensor([[0, 1, 2, 3], [0, -1, 2, 3]], dtype=torch.int32), ("-1", "1, 1")),
    "int64-min": (torch.tensor([0, 1, 2, -(2**63)]), (str(-(2**63)), "3")),
    "int64-max": (torch.tensor([2**63 - 1, 1, 2, 10]), (str(2**63 - 1), "0")),
    "wraps-in-32-bits": (torch.tensor([0, 2**32, 2, 10]), (str(2**32), "1")),
}


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("form", ("apply", "apply_", "rotate", "rotate_", "apply_cos_sin_", "rotate_cos_sin"))
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_positions_out_of_range(name: str, form: str, mode: Callable) -> None:
    """On the CPU an IndexError before anything is written; on CUDA a device assert, which would end the process."""
    positions, fragments = OUT_OF_RANGE[name]
    xs = place_pair("sliced", (2, 4, 3, 16))[: 2 if "apply" in form else 1]
    table = random_table((11, 8))
    before = [snapshot(x) for x in xs]
    with mode(), pytest.raises(IndexError) as error:
        op(form)(*xs, *((table.real, table.imag) if "cos_sin" in form else (table,)), positions)
    for fragment in (form, *fragments, "11 rows"):
        assert fragment in str(error.value)
    for x, old in zip(xs, before, strict=True):
        assert torch.equal(snapshot(x), old)


def test_a_bad_position_far_into_a_large_call() -> None:
    """No thread may write before all the positions are known to be right."""
    x = torch.randn(1, 4001, 8, 64)
    positions = torch.arange(4001)
    positions[3999] = 4001
    before = x.clone()
    with pytest.raises(IndexError, match=r"3999.*4001"):
        op("rotate_")(x, random_table((4001, 32)), positions)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", ((2, 4, 0, 16), (0, 4, 3, 16), (4, 0, 16)))
def test_positions_of_empty_calls_are_checked_too(shape: tuple[int, ...]) -> None:
    for form in ("apply", "apply_"):
        x = torch.empty(shape)
        with pytest.raises(IndexError, match=r"positions\[1\] = 11 .* 11 rows"):
            op(form)(x, x.clone(), random_table((11, 8)), torch.tensor([0, 11, 2, 3]))


def test_empty_calls_need_no_rows() -> None:
    x = torch.empty(2, 0, 3, 16, dtype=F64)
    check(x, x[:, :, :1], random_table((0, 8)), torch.empty(2, 0, dtype=torch.int64))
