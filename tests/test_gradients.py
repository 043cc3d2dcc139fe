"""Gradients of x and of the table, forward and backward, once and twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cases import BF16, CASES, F32, F64, Case, each_dtype, each_pairing, place_pair, random_rows, random_table, short
from harness import assert_same, formula, op
from rope_ext import reference

C128 = torch.complex128
# on CUDA the gradient of a row that several tokens use is summed in any order
gradcheck, gradgradcheck = (
    partial(f, nondet_tol=1e-12) for f in (torch.autograd.gradcheck, torch.autograd.gradgradcheck)
)
each_conj = pytest.mark.parametrize("conj", (False, True), ids=("", "conj"))
SITUATIONS = {
    # layout, shape of x, rotary_dim, row form, dtype of the table
    "whole": ("dense", (2, 3, 1, 6), None, "rows", C128),
    "partial": ("sliced", (2, 3, 1, 6), 4, "rows", C128),
    "ids-by-sample": ("heads-first", (2, 3, 2, 4), None, "ids-by-sample", C128),
    "packed": ("head-range", (3, 2, 6), 4, "rows", C128),
    "packed-ids": ("dense", (3, 2, 4), None, "ids", C128),
    "rows-by-sample": ("stepped", (2, 3, 1, 4), None, "rows-by-sample", C128),
    "rows-shared": ("dense", (2, 3, 1, 4), None, "rows-shared", C128),
    "cos-sin": ("tokens-first", (2, 3, 1, 6), 4, "rows", F64),
    "cos-sin-ids-shared": ("sliced", (2, 3, 1, 4), None, "ids-shared", F64),
}


def situation(name: str, interleaved: bool, conj: bool, device: str) -> tuple[Callable, list[Tensor]]:
    """The rotation of one situation as a function of x and the table alone, and those as float64 leaves."""
    layout, shape, rotary_dim, rows, dtype = SITUATIONS[name]
    x, _ = place_pair(layout, shape, F64, device)
    table, positions = random_rows(rows, shape, (rotary_dim or shape[-1]) // 2, dtype, device)
    tables = (table,) if isinstance(table, Tensor) else table
    form = op("rotate" if len(tables) == 1 else "rotate_cos_sin")
    leaves = [t.detach().requires_grad_() for t in (x, *tables)]
    return lambda *leaves: form(*leaves, positions, interleaved, rotary_dim, conj), leaves


@each_conj
@each_pairing
@pytest.mark.parametrize("name", SITUATIONS)
def test_first_and_second_derivatives(name: str, interleaved: bool, conj: bool, device: str) -> None:
    rotate, leaves = situation(name, interleaved, conj, device)
    gradcheck(rotate, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    gradgradcheck(rotate, leaves)


@each_pairing
@pytest.mark.parametrize("name", ("whole", "ids-by-sample", "cos-sin"))
def test_derivatives_when_only_one_input_needs_them(name: str, interleaved: bool, device: str) -> None:
    rotate, leaves = situation(name, interleaved, False, device)
    for i, leaf in enumerate(leaves):
        rest = [other.detach() for other in leaves]

        def of_one(x: Tensor, i: int = i, rest: list[Tensor] = rest) -> Tensor:
            return rotate(*rest[:i], x, *rest[i + 1 :])

        gradcheck(of_one, [leaf], check_forward_ad=True)
        gradgradcheck(of_one, [leaf])


@each_pairing
def test_both_outputs_of_apply(interleaved: bool, device: str) -> None:
    pair = [x.detach().requires_grad_() for x in place_pair("dense", (2, 3, 1, 4), F64, device)]
    table = random_table((3, 2), C128, device).detach().requires_grad_()
    gradcheck(lambda *t: op("apply")(*t, None, interleaved), [*pair, table], check_forward_ad=True)
    cos, sin = (part.detach().clone().requires_grad_() for part in (table.real, table.imag))
    gradcheck(lambda *t: op("apply_cos_sin")(*t, None, interleaved), [*pair, cos, sin], check_forward_ad=True)


@each_conj
@each_pairing
@each_dtype
@pytest.mark.parametrize("rotary_dim", (None, 24))
def test_the_gradient_is_the_conjugate_rotation(
    rotary_dim: int | None, dtype: torch.dtype, interleaved: bool, conj: bool, device: str
) -> None:
    """Bit for bit, whatever the length of the factors."""
    pair = [x.detach().requires_grad_() for x in place_pair("sliced", (2, 5, 3, 40), dtype, device)]
    table = random_table((5, (rotary_dim or 40) // 2), device=device)
    options = (None, interleaved, rotary_dim)
    outs = op("apply")(*pair, table, *options, conj)
    cotangents = [torch.randn(out.shape, device=device).to(dtype) for out in outs]
    expected = reference.apply(*cotangents, table, *options, not conj)
    for grad, want in zip(torch.autograd.grad(outs, pair, cotangents), expected, strict=True):
        assert_same(grad, want)


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.q], ids=lambda case: case.name)
def test_gradients_equal_those_of_the_formula(case: Case, device: str) -> None:
    inputs = case.make(device)
    tables = (inputs.table,) if isinstance(inputs.table, Tensor) else inputs.table
    leaves = [t.detach().requires_grad_() for t in (inputs.xq, inputs.xk, *tables)]
    table = leaves[2] if len(tables) == 1 else tuple(leaves[2:])
    outs = op("apply" if len(tables) == 1 else "apply_cos_sin")(*leaves, *inputs[3:])
    cotangents = [torch.randn(out.shape, device=device).to(out.dtype) for out in outs]
    actual = torch.autograd.grad(outs, leaves, cotangents)
    expected = torch.autograd.grad(formula(leaves[0], leaves[1], table, *inputs[3:]), leaves, cotangents)
    for leaf, a, b in zip(leaves, actual, expected, strict=True):
        assert (a.dtype, a.shape) == (leaf.dtype, leaf.shape)
        # a table's gradient is a sum over heads and samples: its order, and where it is rounded, is free
        wide = (
            2**-6 if BF16 in (leaf.dtype, case.dtype) else 2**-9 if torch.float16 in (leaf.dtype, case.dtype) else 1e-5
        )
        torch.testing.assert_close(a, b, rtol=wide, atol=wide * b.abs().max().item())


@each_pairing
@each_dtype
def test_cotangents_of_any_stride(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    x = place_pair("heads-first", (2, 5, 3, 16), dtype, device)[0].detach().requires_grad_()
    table = random_table((5, 8), device=device)
    out = op("rotate")(x, table, None, interleaved)
    transposed = torch.randn(16, 3, 5, 2, device=device).to(dtype).permute(3, 2, 1, 0)
    for cotangent in (torch.ones((), dtype=dtype, device=device).expand(out.shape), transposed):
        (grad,) = torch.autograd.grad(out, x, cotangent, retain_graph=True)
        assert_same(grad, reference.rotate(cotangent, table, None, interleaved, None, True))
    out.sum().backward()
    assert_same(x.grad, reference.rotate(torch.ones_like(out), table, None, interleaved, None, True).contiguous())


def test_an_unused_output_and_an_input_without_grad(device: str) -> None:
    pair = place_pair("sliced", (2, 5, 3, 8), F32, device)
    table = random_table((5, 4), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xq, xk = (x.detach().requires_grad_() for x in pair)
        q, k = op("apply")(xq, xk, table)
        q.sum().backward()
        assert xq.grad.abs().max() > 0
        # an output that nobody used has the gradient zero, or none
        assert xk.grad is None or not xk.grad.any()
        xk = pair[1].detach().requires_grad_()
        q, k = op("apply")(pair[0], xk, table)
        assert not q.requires_grad and k.requires_grad
        k.sum().backward()
        assert_same(xk.grad, reference.rotate(torch.ones_like(k), table, conj=True))
        assert table.grad is None


def test_what_backward_needs_is_guarded(device: str) -> None:
    x = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    table = random_table((5, 4), device=device)
    positions = torch.tensor([4, 0, 1, 1, 2], device=device)
    for changed in (table, positions):
        out = op("rotate")(x, table, positions)
        changed.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = op("rotate")(x, table, positions)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


SAVING = {  # what a table argument is made of, and whether x is rotated in place
    "apply": (lambda table: (table,), False),
    "apply_cos_sin": (lambda table: (table.real.clone(), table.imag.clone()), False),
    "apply_": (lambda table: (table.conj(),), True),
    "apply_cos_sin_": (lambda table: (table.real, table.imag), True),
}


@pytest.mark.parametrize("form", SAVING)
def test_nothing_of_x_is_kept_for_the_gradient_of_x(form: str, device: str) -> None:
    """The rotation is linear: q and k each keep the table and the positions as they are, whatever their own size."""
    make_tables, in_place = SAVING[form]
    pair = [x.detach().requires_grad_() for x in place_pair("dense", (2, 50, 3, 8), F32, device)]
    pair = [x * 2 for x in pair] if in_place else pair
    table, positions = random_rows("ids", (2, 50, 3, 8), 4, device=device)
    tables, saved = make_tables(table), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        op(form)(*pair, *tables, positions)
    kept = (*tables, positions)
    assert [(t.data_ptr(), t.shape) for t in saved] == [(t.data_ptr(), t.shape) for t in kept] * 2

    if not in_place:  # only a gradient of the table needs x
        tables[0].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            op(form)(*pair, *tables, positions)
        assert {x.data_ptr() for x in pair} <= {t.data_ptr() for t in saved}


@each_pairing
def test_a_bf16_table_per_sample_gets_a_bf16_gradient(interleaved: bool, device: str) -> None:
    x, _ = place_pair("dense", (2, 3, 5, 16), BF16, device)
    cos, sin = (t.detach().requires_grad_() for t in random_table((2, 3, 8), BF16, device))
    op("rotate_cos_sin")(x, cos, sin, None, interleaved).sum().backward()
    wide = [t.detach().float().requires_grad_() for t in (cos, sin)]
    reference.rotate_cos_sin(x.float(), *wide, None, interleaved).sum().backward()
    for narrow, exact in zip((cos, sin), wide, strict=True):
        assert narrow.grad.dtype == BF16 and narrow.grad.shape == (2, 3, 8)
        assert (narrow.grad.float() - exact.grad).abs().max() <= 2**-7 * exact.grad.abs().max()


@pytest.mark.parametrize("table_dtype", (torch.complex64, C128, F32, F64), ids=short)
@each_dtype
def test_dtypes_of_gradients(dtype: torch.dtype, table_dtype: torch.dtype, device: str) -> None:
    x = place_pair("dense", (2, 3, 5, 16), dtype, device)[0].detach().requires_grad_()
    table = random_table((3, 8), table_dtype, device)
    tables = [t.detach().requires_grad_() for t in ((table,) if table_dtype.is_complex else table)]
    out = op("rotate" if table_dtype.is_complex else "rotate_cos_sin")(x, *tables)
    for leaf, grad in zip((x, *tables), torch.autograd.grad(out.float().square().sum(), (x, *tables)), strict=True):
        assert grad.dtype == leaf.dtype


@each_pairing
def test_forward_mode_of_both_inputs(interleaved: bool, device: str) -> None:
    pair = place_pair("sliced", (2, 5, 3, 8), F64, device)
    table = random_table((5, 4), C128, device)
    tangents = [torch.randn_like(t) for t in (pair[0], table)]
    with forward_ad.dual_level():
        xq, dual_table = (forward_ad.make_dual(t, d) for t, d in zip((pair[0], table), tangents, strict=True))
        q, k = (forward_ad.unpack_dual(out) for out in op("apply")(xq, pair[1], dual_table, None, interleaved))
    by_x, by_table = (reference.rotate(*a, None, interleaved) for a in ((tangents[0], table), (pair[0], tangents[1])))
    torch.testing.assert_close(q.tangent, by_x + by_table)
    torch.testing.assert_close(k.tangent, reference.rotate(pair[1], tangents[1], None, interleaved))


@each_pairing
def test_one_leaf_in_several_places(interleaved: bool, device: str) -> None:
    """As q and as k, as cos and as sin, behind a lazy conjugate and a lazy negative: the parts add up."""
    x = torch.randn(2, 5, 3, 8, dtype=F64, device=device, requires_grad=True)
    table = torch.randn(5, 4, dtype=C128, device=device, requires_grad=True)
    cos = torch.randn(5, 4, dtype=F64, device=device, requires_grad=True)

    def total(apply: Callable, rotate_cos_sin: Callable) -> Tensor:
        q, k = apply(x, x, table.conj(), None, interleaved)
        twice = rotate_cos_sin(x, cos, cos, None, interleaved)
        negative = rotate_cos_sin(x, cos, torch._neg_view(cos), None, interleaved)
        return q.pow(3).sum() + k.square().sum() + twice.square().sum() + negative.pow(3).sum()

    grads = [
        torch.autograd.grad(total(*functions), (x, table, cos))
        for functions in ((op("apply"), op("rotate_cos_sin")), (reference.apply, reference.rotate_cos_sin))
    ]
    torch.testing.assert_close(*grads)


def test_no_grad_and_inference_mode_make_no_graph(device: str) -> None:
    x = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    table = random_table((5, 4), device=device)
    expected = reference.rotate(x, table).detach()
    with torch.no_grad():
        out = op("rotate")(x, table)
    assert out.grad_fn is None and not out.requires_grad and not out.is_inference()
    assert_same(out, expected)
    with torch.inference_mode():
        for inference_x in (x, x.detach().clone()):
            out, _ = op("apply")(inference_x, inference_x, table)
            assert out.is_inference() and not out.requires_grad
            assert_same(out, expected)
