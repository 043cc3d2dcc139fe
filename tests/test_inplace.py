"""What only in-place calls have: version counters, shared buffers, and memory they must not write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import F32, LAYOUTS, Case, each_case, each_dtype, each_pairing, place_pair, random_table
from harness import assert_same, check, check_in_place, formula, op, snapshot
from rope_ext import reference

MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


@pytest.mark.parametrize("mode", MODES)
@each_case
def test_equal_to_the_functional_result_in_every_mode(case: Case, mode: Callable, device: str) -> None:
    """`check_in_place` also sees to the result None, the version counters and the bytes around the tensors."""
    xq, xk, table, *options = case.make(device)
    tables = (table,) if isinstance(table, Tensor) else table
    name = "apply_" if len(tables) == 1 else "apply_cos_sin_"
    expected = op(name[:-1])(xq, xk, *tables, *options)
    check_in_place(name, (xq, xk), (*tables, *options), expected, mode)


def test_inference_tensors(device: str) -> None:
    """They have no version counter."""
    with torch.inference_mode():
        pair = place_pair("sliced", (2, 5, 3, 24), F32, device)
        table = random_table((5, 12), device=device)
        expected = reference.apply(*pair, table)
        assert op("apply_")(*pair, table) is None
    for x, want in zip(pair, expected, strict=True):
        assert_same(x, want)


@each_pairing
@each_dtype
@pytest.mark.parametrize("rotary_dim", (None, 32))
@pytest.mark.parametrize("order", ("tokens-first", "heads-first"))
def test_views_of_a_fused_qkv_buffer(
    order: str, rotary_dim: int | None, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    qkv = torch.randn(2, 7, 12, 64, device=device).to(dtype)
    if order == "heads-first":
        qkv = torch.randn(2, 12, 7, 64, device=device).to(dtype).transpose(1, 2)
    q, k, v = qkv.split((8, 2, 2), 2)
    check(q, k, random_table((7, (rotary_dim or 64) // 2), device=device), None, interleaved, rotary_dim)
    kept = v.clone()
    op("apply_")(q, k, random_table((7, 32), device=device), None, interleaved)
    assert_same(v.clone(), kept)


@each_pairing
@each_dtype
def test_a_kv_cache_is_written_where_it_stands(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    cache = LAYOUTS["heads-first"].place((3, 20, 2, 64), dtype, device)
    before = cache.clone()
    table = random_table((4, 32), device=device)
    op("rotate_")(cache[1:, 9:13], table, None, interleaved)
    before[1:, 9:13] = reference.rotate(before[1:, 9:13], table, None, interleaved)
    assert_same(cache.contiguous(), before.contiguous())


def aliases(x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of tensors with elements in common; x is (2, 4, 6, 8)."""
    return {
        "the-same-tensor": (x, x),
        "a-view": (x, x[:]),
        "a-detached-alias": (x, x.detach()),
        "a-reshaped-alias": (x, x.reshape(2, 4, 6, 8)),
        "overlapping-heads": (x[:, :, :4], x[:, :, 3:]),
        "one-head-in-common": (x[:, :, :3], x[:, :, 2:3]),
        "features-shifted-by-one": (
            x.flatten()[:-8].view(-1, 8)[:40].view(2, 4, 5, 8),
            x.flatten()[1:-7].view(-1, 8)[:40].view(2, 4, 5, 8),
        ),
        "another-dtype": (x, x.view(torch.int32).view(torch.float32)),
        "another-storage": (x, torch.from_numpy(x.numpy())),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ("apply_", "apply_cos_sin_"))
@pytest.mark.parametrize("name", aliases(torch.zeros(2, 4, 6, 8)))
def test_queries_that_share_memory_with_keys(name: str, form: str, mode: Callable) -> None:
    xq, xk = aliases(torch.randn(2, 4, 6, 8))[name]
    table = random_table((4, 4))
    before = snapshot(xq)
    with mode(), pytest.raises(RuntimeError, match=f"rope::{form}: .*xq and xk share memory"):
        op(form)(xq, xk, *((table,) if form == "apply_" else (table.real, table.imag)))
    assert torch.equal(snapshot(xq), before)


@pytest.mark.parametrize("fake", (False, True), ids=("meta", "fake"))
def test_meta_and_fake_tensors_that_share_memory(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.device("meta"):
        x, table = torch.zeros(2, 4, 6, 8), torch.zeros(4, 4, dtype=torch.complex64)
        for xk in (x, x[:], x[:, :, 3:], x.detach()):
            with pytest.raises(RuntimeError, match="xq and xk share memory"):
                op("apply_")(x, xk, table)
        op("apply_")(x[:, :, :3], x[:, :, 3:], table)


def test_tables_and_positions_that_share_memory_with_x(device: str) -> None:
    buffer = torch.randn(4 * 6 * 8 + 100, device=device)
    x = buffer[: 4 * 6 * 8].view(1, 4, 6, 8)
    overlapping = {
        "freqs_cis": (torch.view_as_complex(buffer[160:192].view(4, 4, 2)),),
        "cos": (buffer[:16].view(4, 4), buffer[200:216].view(4, 4)),
        "sin": (buffer[200:216].view(4, 4), buffer[180:196].view(4, 4)),
    }
    for name, tables in overlapping.items():
        form = "rotate_" if len(tables) == 1 else "rotate_cos_sin_"
        before = snapshot(buffer)
        with pytest.raises(RuntimeError, match=f"x and {name} share memory"):
            op(form)(x, *tables)
        assert torch.equal(snapshot(buffer), before)
    positions = buffer[:8].view(torch.int64)
    positions.copy_(torch.arange(4))
    table = random_table((4, 4), device=device)
    with pytest.raises(RuntimeError, match="x and positions share memory"):
        op("rotate_")(x, table, positions)
    # right beside it is not in it
    op("rotate_")(x, torch.view_as_complex(buffer[192:224].view(4, 4, 2)))


SELF_OVERLAPPING = {
    # sizes and strides where two indices have one address, none of the strides 0
    "sliding-window-of-tokens": ((1, 5, 2, 8), (0, 8, 8, 1)),
    "sliding-window-of-features": ((2, 3, 2, 8), (64, 16, 4, 1)),
    "heads-meet-tokens": ((1, 3, 3, 8), (0, 16, 16, 1)),
    "meeting-once": ((1, 3, 4, 8), (0, 24, 8, 1)),
}


@pytest.mark.parametrize("name", SELF_OVERLAPPING)
def test_self_overlapping_inputs(name: str, device: str) -> None:
    sizes, strides = SELF_OVERLAPPING[name]
    buffer = torch.randn(300, device=device)
    x = buffer.as_strided(sizes, strides, 3)
    table = random_table((sizes[1], 4), device=device)
    before = snapshot(buffer)
    with pytest.raises(RuntimeError, match="rope::rotate_: x "):
        op("rotate_")(x, table)
    assert torch.equal(snapshot(buffer), before)


@each_pairing
def test_interleaved_lanes_of_one_buffer(interleaved: bool, device: str) -> None:
    """q on the even elements and k on the odd ones: they are disjoint, so both are rotated."""
    buffer = torch.randn(2, 5, 3, 48, device=device)
    check(buffer[..., 0::2], buffer[..., 1::2], random_table((5, 12), device=device), None, interleaved)


def test_version_counters_stop_a_backward_that_would_be_wrong(device: str) -> None:
    x = torch.randn(2, 5, 3, 8, device=device)
    weight = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    loss = (weight * x).sum()
    with torch.inference_mode():
        op("rotate_")(x, random_table((5, 4), device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_that_requires_grad_is_refused(device: str) -> None:
    table = random_table((5, 4), device=device)
    for form in ("apply_", "rotate_", "apply_cos_sin_", "rotate_cos_sin_"):
        xs = [torch.randn(2, 5, heads, 8, device=device) for heads in (3, 2)][: 2 if "apply" in form else 1]
        tables = (table.real, table.imag) if "cos_sin" in form else (table,)
        for i in range(len(xs)):
            inputs = [x.clone().requires_grad_(i == j) for j, x in enumerate(xs)]
            before = [snapshot(x) for x in inputs]
            with pytest.raises(RuntimeError, match="leaf"):
                op(form)(*inputs, *tables)
            assert all(torch.equal(snapshot(x), old) for x, old in zip(inputs, before, strict=True))
            with pytest.raises(RuntimeError, match="leaf"):
                op(form)(*(x[:, 1:] for x in inputs), *(table[1:] for table in tables))
            with torch.no_grad():
                op(form)(*inputs, *tables)
            expected = formula(*(xs * 2)[:2], table)
            for x, want in zip(inputs, expected, strict=False):
                assert_same(x.detach(), want)


@each_pairing
@pytest.mark.parametrize("form", ("apply_", "rotate_", "apply_cos_sin_", "rotate_cos_sin_"))
@pytest.mark.parametrize("view", (False, True), ids=("whole", "view"))
def test_gradients_in_place_are_right_or_refused(view: bool, form: str, interleaved: bool, device: str) -> None:
    """On a tensor of the graph that is no leaf, and on a view of one."""
    leaves = [torch.randn(2, 5, heads, 8, device=device, requires_grad=True) for heads in (3, 2)]
    table = random_table((5, 4), device=device)
    options = (None, interleaved, None, True)
    weights = [torch.randn(2, 5, heads, 8, device=device) for heads in (3, 2)]

    def loss(rotated: list[Tensor]) -> Tensor:
        return sum((x.sin() * w).sum() for x, w in zip(rotated, weights, strict=True))

    count = 2 if "apply" in form else 1
    expected = [reference.rotate(x * 2, table, *options) if i < count else x * 2 for i, x in enumerate(leaves)]
    wanted = torch.autograd.grad(loss(expected), leaves)

    bases = [x * 2 for x in leaves]
    xs = [base[:, :, :] if view else base for base in bases][:count]
    try:
        op(form)(*xs, *((table.real, table.imag) if "cos_sin" in form else (table,)), *options)
    except RuntimeError as error:
        assert "rope::" in str(error)
        return
    for actual, want in zip(torch.autograd.grad(loss(bases), leaves), wanted, strict=True):
        torch.testing.assert_close(actual, want)


@each_pairing
@pytest.mark.parametrize("form", ("apply_", "apply_cos_sin_"))
def test_gradients_through_a_fused_buffer_rotated_in_place(form: str, interleaved: bool, device: str) -> None:
    """The job of a training step: q and k are slices of one projection."""
    leaf = torch.randn(2, 5, 7, 8, device=device, requires_grad=True)
    weight = torch.randn(2, 5, 7, 8, device=device)
    table = random_table((5, 4), device=device)
    q, k, v = (leaf * 2)[:, :, :4], (leaf * 2)[:, :, 4:6], (leaf * 2)[:, :, 6:]
    rotated = torch.cat((*reference.apply(q, k, table, None, interleaved), v), 2)
    (wanted,) = torch.autograd.grad((rotated.sin() * weight).sum(), leaf)

    qkv = leaf * 2
    try:
        tables = (table,) if form == "apply_" else (table.real, table.imag)
        op(form)(qkv[:, :, :4], qkv[:, :, 4:6], *tables, None, interleaved)
    except RuntimeError as error:
        assert "rope::" in str(error)
        return
    (actual,) = torch.autograd.grad((qkv.sin() * weight).sum(), leaf)
    torch.testing.assert_close(actual, wanted)
