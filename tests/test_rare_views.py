"""Lazily negated tensors, and writes that vmap would spread over samples: rare, and wrong in silence if at all."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import rope_ext  # noqa: F401
from cases import random_table
from rope_ext import reference

ops = torch.ops.rope


def negated(values: Tensor) -> Tensor:
    """The same values as a lazily negated view."""
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg() and torch.equal(view, values)
    return view


def test_in_place_on_a_negated_view_has_the_bits_of_the_functional_call() -> None:
    table = torch.tensor([[1 + 1j, 1 - 1j]])
    x = torch.ones(1, 1, 1, 4)  # a*c - b*s cancels exactly in the first pair: the sign of that zero must agree
    view = negated(x)
    ops.rotate_(view, table)
    expected = ops.rotate(x, table)
    assert torch.equal(view, expected)
    assert torch.equal(view.signbit(), expected.signbit())


def test_a_refusal_leaves_a_negated_view_alone() -> None:
    view = negated(torch.randn(1, 4, 2, 8))
    before = view.clone()
    with pytest.raises(IndexError, match="positions"):
        ops.rotate_(view, random_table((5, 4)), torch.tensor([0, 1, 9, 3]))
    with pytest.raises(RuntimeError, match="several elements in one place"):
        ops.rotate_(view[:, :1].expand(1, 4, 2, 8), random_table((4, 4)))
    assert torch.equal(view, before)


def test_a_negated_complex_table() -> None:
    x, table = torch.randn(2, 5, 3, 8), random_table((5, 4))
    assert torch.equal(ops.rotate(x, torch._neg_view(table)), reference.rotate(x, -table))
    assert torch.equal(ops.rotate(x, torch._neg_view(table.conj())), reference.rotate(x, (-table).conj()))


@pytest.mark.parametrize("in_dims", ((0, None), (None, 0), (0, 0)), ids=str)
def test_vmap_refuses_to_write_in_place(in_dims: tuple) -> None:
    """Also where it would go right: whether samples share memory cannot be told from inside."""
    x, table = torch.randn(3, 4, 2, 8), random_table((3, 4, 4))
    args = [value if dim == 0 else value[0] for value, dim in zip((x, table), in_dims, strict=True)]
    before = x.clone()
    with pytest.raises(RuntimeError, match="rope::rotate_: vmap cannot write in place"):
        vmap(lambda x, table: (ops.rotate_(x, table), x)[1], in_dims)(*args)
    with pytest.raises(RuntimeError, match="rope::apply_: vmap cannot write in place"):
        vmap(lambda x, table: (ops.apply_(x, x, table), x)[1], in_dims)(*args)
    assert torch.equal(x, before)


def test_negated_tables_on_a_device_without_a_kernel() -> None:
    """The formula on ATen ops runs below the key that would resolve the views, as a call from above leaves it."""
    x, table = torch.randn(2, 5, 3, 8), random_table((5, 4)).conj()
    elsewhere = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)):
        out = ops.rotate_cos_sin.default.redispatch(elsewhere, x, table.real, table.imag)
        complex_out = ops.rotate.default.redispatch(elsewhere, x, torch._neg_view(table))
    assert torch.equal(out, reference.rotate(x, table))
    assert torch.equal(complex_out, reference.rotate(x, (-table).resolve_conj()))


def test_a_refusal_with_a_tangent_names_the_call() -> None:
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8))
        with pytest.raises(ValueError, match=r"^rope::apply_: freqs_cis must have one row per token"):
            ops.apply_(q, torch.randn(1, 4, 1, 8), random_table((5, 4)))


def test_a_leaf_that_requires_grad_is_named() -> None:
    xk = torch.randn(1, 4, 1, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="rope::apply_: xk is a leaf"):
        ops.apply_(torch.randn(1, 4, 2, 8), xk, random_table((4, 4)))
