"""What the numbers are: results known in advance, and properties that every rotation has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases import BF16, F16, F32, F64, LAYOUTS, each_dtype, each_pairing, place_pair, random_table, unit_table
from harness import assert_same, check, op
from rope_ext import reference


def head(*values: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(values, dtype=dtype).view(1, 1, 1, -1)


def factors(*values: complex) -> Tensor:
    return torch.tensor([values], dtype=torch.complex64)


NAN, INF = math.nan, math.inf
KNOWN = {
    # one head in, its table row, the result of neighbours and of halves (None: not known by hand)
    "quarter-and-half-turn": ((1, 2, 3, 4), factors(1j, -1), (-2, 1, -3, -4), (-3, -2, 1, -4)),
    "identity": ((5, 6, 7, 8), factors(1, 1), (5, 6, 7, 8), (5, 6, 7, 8)),
    "position-1": (
        (1, 2, 3, 4),
        unit_table(4, 1, 1),
        (-1.1426396, 1.9220755, 2.9598505, 4.0297995),
        (-1.9841106, 1.9599007, 2.4623780, 4.0197997),
    ),
    "position-3": ((1, 2, 3, 4), unit_table(4, 3, 1), (-1.2722325, -1.8388650, 2.8786681, 4.0881867), None),
    "position-7-d2": ((3, 4), unit_table(2, 7, 1), (-0.3662395, 4.9865689), (-0.3662395, 4.9865689)),
    "length-1.4": ((3, 4), factors(1.4158883), (4.2476649, 5.6635532), (4.2476649, 5.6635532)),
    "inf-and-nan": ((INF, 1, 1, NAN), unit_table(4, 0, 1), (INF, NAN, NAN, NAN), None),
}


@each_pairing
@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name: str, interleaved: bool, device: str) -> None:
    values, table, *results = KNOWN[name]
    x = head(*values).to(device)
    out, _ = check(x, 2 * x, table.to(device), None, interleaved)
    if (expected := results[not interleaved]) is not None:
        torch.testing.assert_close(out.cpu(), head(*expected), rtol=1e-7, atol=6e-8, equal_nan=True)


def test_queries_and_keys_are_not_swapped(device: str) -> None:
    q, k = check(head(1, 2, 3, 4).to(device), head(5, 6, 7, 8).to(device), factors(1j, -1).to(device))
    assert_same(q.cpu(), head(-2, 1, -3, -4))
    assert_same(k.cpu(), head(-6, 5, -7, -8))


def test_overflow_of_fp16_is_inf_and_no_error(device: str) -> None:
    out, _ = check(
        head(60000, 60000, dtype=F16).to(device), head(1, 2).to(device), factors(0.70710678 * (1 + 1j)).to(device)
    )
    assert_same(out.cpu(), head(0, INF, dtype=F16))


@each_dtype
@each_pairing
@pytest.mark.parametrize("head_dim", (2, 64, 128, 1030))
def test_position_zero_changes_no_value(head_dim: int, dtype: torch.dtype, interleaved: bool, device: str) -> None:
    xq, xk = place_pair("sliced", (3, 1, 5, head_dim), dtype, device)
    q, k = check(xq, xk, unit_table(head_dim, 0, 1).to(device), None, interleaved)
    assert q.equal(xq) and k.equal(xk)


@each_dtype
@each_pairing
def test_length_of_the_factors_counts(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("sliced", (2, 5, 3, 48), dtype, device)
    table = random_table((5, 24), device=device)
    out, _ = check(*pair, table, None, interleaved)
    doubled, _ = check(*pair, 2 * table, None, interleaved)
    assert_same(doubled, 2 * out)


@each_pairing
@pytest.mark.parametrize(("dtype", "bound"), ((F32, 2e-6), (F64, 2e-6)), ids=("fp32", "fp64"))
def test_conj_undoes_the_rotation(dtype: torch.dtype, bound: float, interleaved: bool, device: str) -> None:
    x, xk = place_pair("heads-first", (2, 9, 3, 64), dtype, device)
    table = unit_table(64, 5, 9).to(device)
    out, _ = check(x, xk, table, None, interleaved)
    back, _ = check(out, xk, table, None, interleaved, None, True)
    assert (out - x).abs().max() > 0.1
    assert (back - x).abs().max() < bound


@each_dtype
@each_pairing
def test_conj_is_the_conjugate_table(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("gaps", (2, 5, 3, 66), dtype, device)
    table = random_table((5, 33), device=device)
    conjugated, _ = check(*pair, table, None, interleaved, None, True)
    # a lazy conjugate is only a flag on the view: it must be read through, and the two signs cancel
    assert table.conj().is_conj()
    lazy, _ = check(*pair, table.conj(), None, interleaved)
    cancelled, _ = check(*pair, table.conj(), None, interleaved, None, True)
    assert_same(conjugated, reference.rotate(pair[0], table.conj().resolve_conj(), None, interleaved))
    assert_same(lazy, conjugated)
    assert_same(cancelled, reference.rotate(pair[0], table, None, interleaved))


def test_lazy_negation_of_cos_and_sin(device: str) -> None:
    pair = place_pair("dense-at-1", (2, 5, 3, 16), F32, device)
    table = random_table((5, 8), device=device)
    sin = table.conj().imag
    assert sin.is_neg()
    out, _ = check(*pair, (table.real, sin))
    assert_same(out, reference.rotate(pair[0], table, conj=True))
    check(*pair, (torch._neg_view(table.real), table.imag), conj=True)


@each_pairing
def test_lazy_negation_of_queries(interleaved: bool, device: str) -> None:
    """The imaginary part of a lazy conjugate is real, and lazily negated."""
    xq = LAYOUTS["sliced"].place((2, 5, 3, 16), F32, device)
    xk = torch.randn(2, 5, 1, 16, dtype=torch.complex64, device=device).conj().imag
    assert xk.is_neg()
    table = random_table((5, 8), device=device)
    expected = reference.apply(xq, xk.resolve_neg(), table, None, interleaved)
    for out, want in zip(op("apply")(xq, xk, table, None, interleaved), expected, strict=True):
        assert_same(out, want)
    op("apply_")(xq, xk, table, None, interleaved)
    for out, want in zip((xq, xk.resolve_neg()), expected, strict=True):
        assert_same(out, want)


def test_zeros_without_memory(device: str) -> None:
    """What autograd passes for a tangent that is not there."""
    x = torch._efficientzerotensor((2, 5, 3, 16), device=device)
    out = op("rotate")(x, random_table((5, 8), device=device))
    assert out.shape == x.shape and not out.any()


@each_dtype
@each_pairing
@pytest.mark.parametrize("head_dim", (8, 64, 80, 130))
def test_a_nan_stays_in_its_pair(head_dim: int, dtype: torch.dtype, interleaved: bool, device: str) -> None:
    pair = place_pair("sliced", (2, 3, 5, head_dim), dtype, device)
    table = random_table((3, head_dim // 2), device=device)
    clean, _ = check(*pair, table, None, interleaved)
    a, b = (4, 5) if interleaved else (3, 3 + head_dim // 2)
    pair[0][1, 2, 4, a] = NAN
    out, _ = check(*pair, table, None, interleaved)
    clean[1, 2, 4, [a, b]] = NAN
    assert_same(out, clean)


@each_dtype
@each_pairing
def test_subnormals_are_kept(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    x = torch.randint(-40, 41, (2, 7, 3, 48), device=device).to(dtype) * smallest
    assert 0 < x[x != 0].abs().min() < info.tiny
    table = unit_table(48, 9, 7).to(device)
    out, _ = check(x, x.flip(2), table, None, interleaved)
    assert out.count_nonzero() > out.numel() // 2
    identity, _ = check(x, x.flip(2), torch.ones_like(table), None, interleaved)
    assert identity.equal(x)


def test_the_norm_of_every_pair_is_kept(device: str) -> None:
    x = LAYOUTS["tokens-first"].place((2, 16, 4, 128), F32, device)
    out, _ = check(x, x.flip(2), unit_table(128, 50, 16).to(device))
    norms = [t.double().unflatten(-1, (64, 2)).norm(dim=-1) for t in (x, out)]
    assert (norms[0] - norms[1]).abs().max() < 2e-6
    assert (out - x).abs().max() > 0.1


@each_pairing
def test_scores_depend_on_the_distance_only(interleaved: bool, device: str) -> None:
    # exact angles: 1e-9 is out of reach for a table whose own rounding is float32
    inv_freq = 10000.0 ** -(torch.arange(0, 64, 2, dtype=F64) / 64)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=F64, device=device)

    def score(m: int) -> Tensor:
        rows = [torch.polar(torch.ones(1, 32, dtype=F64), p * inv_freq[None]).to(device) for p in (m, m - 7)]
        return (op("rotate")(q, rows[0], None, interleaved) * op("rotate")(k, rows[1], None, interleaved)).sum()

    scores = [score(m) for m in (7, 1000, 50000)]
    assert (scores[0] - q.mul(k).sum()).abs() > 1e-3
    assert max((s - scores[0]).abs() for s in scores) < 1e-9


@each_dtype
@pytest.mark.parametrize(("head_dim", "rotary_dim"), ((128, 128), (96, 64)))
def test_halves_are_permuted_neighbours(head_dim: int, rotary_dim: int, dtype: torch.dtype, device: str) -> None:
    x, xk = place_pair("head-range", (2, 5, 3, head_dim), dtype, device)
    table = random_table((5, rotary_dim // 2), device=device)
    order = torch.cat((torch.arange(rotary_dim).view(2, -1).t().flatten(), torch.arange(rotary_dim, head_dim)))
    neighbours, _ = check(x[..., order], xk, table, None, True, rotary_dim)
    halves, _ = check(x, xk, table, None, False, rotary_dim)
    assert_same(neighbours[..., order.argsort()], halves)


@each_pairing
@each_dtype
@pytest.mark.parametrize(("q_heads", "k_heads"), ((1, 1), (2, 1), (32, 8), (71, 1), (1, 5), (1, 71), (3, 2)))
def test_head_counts(q_heads: int, k_heads: int, dtype: torch.dtype, interleaved: bool, device: str) -> None:
    xq = LAYOUTS["sliced"].place((2, 3, q_heads, 128), dtype, device)
    xk = LAYOUTS["head-range"].place((2, 3, k_heads, 128), dtype, device)
    q, k = check(xq, xk, random_table((3, 64), device=device), None, interleaved)
    assert not q.equal(xq) and not k.equal(xk)


def test_expected_bf16_rounding(device: str) -> None:
    out, _ = check(head(2.015625, -1.0, dtype=BF16).to(device), head(1, 2).to(device), unit_table(2, 7, 1).to(device))
    assert_same(out.cpu(), head(2.171875, 0.5703125, dtype=BF16))
