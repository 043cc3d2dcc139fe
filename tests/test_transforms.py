"""torch.func: grad, vjp, jvp, vmap and their compositions, of x and of the table; activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cases import (
    F32,
    F64,
    PACKED_ROW_FORMS,
    ROW_FORMS,
    each_dtype,
    each_pairing,
    place_pair,
    random_rows,
    random_table,
)
from harness import assert_same, op
from rope_ext import reference
from test_modes import Calls

C128 = torch.complex128


def x_and_table(device: str, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    return place_pair("sliced", (2, 5, 3, 8), dtype, device)[0], random_table((5, 4), C128, device)


def norm_of(rotate: Callable) -> Callable[[Tensor, Tensor], Tensor]:
    weight = torch.linspace(0.3, 2, 8, dtype=F64)
    return lambda x, table: (rotate(x, table).square() * weight.to(x.device)).sum()


@each_pairing
def test_grad(interleaved: bool, device: str) -> None:
    x, table = x_and_table(device)
    mine, theirs = (
        grad(norm_of(lambda x, t, f=f: f(x, t, None, interleaved)), argnums=(0, 1))(x, table)
        for f in (op("rotate"), reference.rotate)
    )
    torch.testing.assert_close(mine, theirs)


@each_pairing
def test_vjp_and_jvp(interleaved: bool, device: str) -> None:
    x, table = x_and_table(device)
    cotangent, *tangents = torch.randn_like(x), torch.randn_like(x), torch.randn_like(table)
    found = []
    for rotate in (op("rotate"), reference.rotate):

        def function(x: Tensor, table: Tensor, rotate: Callable = rotate) -> Tensor:
            return rotate(x, table, None, interleaved)

        out, pullback = vjp(function, x, table)
        found.append((out, pullback(cotangent), jvp(function, (x, table), tuple(tangents))))
    torch.testing.assert_close(found[0], found[1])


def test_composed_transforms(device: str) -> None:
    x, table = (t[:1] if t.ndim == 2 else t[:1, :1] for t in x_and_table(device))
    scalar, scalar_reference = (norm_of(f) for f in (op("rotate"), reference.rotate))
    for transform in (jacrev, jacfwd, hessian, lambda f: jacfwd(jacrev(f)), lambda f: jacrev(jacfwd(f))):
        actual = transform(lambda x: scalar(x, table))(x)
        expected = transform(lambda x: scalar_reference(x, table))(x)
        torch.testing.assert_close(actual, expected)
    per_sample = vmap(grad(scalar), in_dims=(0, None))
    xs = torch.stack((x, 2 * x, -x))
    torch.testing.assert_close(per_sample(xs, table), torch.stack([grad(scalar_reference)(x, table) for x in xs]))


@each_dtype
@pytest.mark.parametrize("cos_sin", (False, True), ids=("complex", "cos-sin"))
@pytest.mark.parametrize("form", (*ROW_FORMS, *(f"packed-{form}" for form in PACKED_ROW_FORMS)))
def test_vmap_over_any_dimensions(form: str, cos_sin: bool, dtype: torch.dtype, device: str) -> None:
    """Every choice of in_dims that takes each dimension of each argument, from the front or from the back."""
    shape = (5, 3, 8) if form.startswith("packed") else (2, 5, 3, 8)
    q, k = place_pair("sliced", shape, dtype, device)
    table, positions = random_rows(form.removeprefix("packed-"), shape, 4, device=device)
    ranks = [len(shape), len(shape), table.ndim, None if positions is None else positions.ndim]
    choices = [[None] if rank is None else [None, *range(-1, rank + 1)] for rank in ranks]

    def samples(x: Tensor | None) -> list[Tensor]:
        if x is None or x.is_floating_point() or x.is_complex():
            return [] if x is None else [x, 2 * x, -x]
        return [x, 10 - x, x.flip(-1)]

    several = [samples(x) for x in (q, k, table, positions)]
    for turn in range(24):
        dims = [options[(turn * (i + 1) + turn // 5) % len(options)] for i, options in enumerate(choices)]
        if dims == [None] * 4:
            continue
        options = (bool(turn % 2), None, turn % 3 == 0)
        inputs = [
            x if dim is None else torch.stack(xs, dim)
            for x, xs, dim in zip((q, k, table, positions), several, dims, strict=True)
        ]

        def call(q: Tensor, k: Tensor, t: Tensor, ids: Tensor | None, options: tuple = options) -> tuple:
            if cos_sin:
                return op("apply_cos_sin")(q, k, t.real, t.imag, ids, *options)
            return op("apply")(q, k, t, ids, *options)

        actual = vmap(call, in_dims=tuple(dims))(*inputs)
        for i in range(3):
            one = [x if dim is None else xs[i] for x, xs, dim in zip(inputs, several, dims, strict=True)]
            for out, want in zip(actual, reference.apply(*one, *options), strict=True):
                assert_same(out[i].contiguous(), want.contiguous(), f"in_dims {dims}, sample {i}")


@each_pairing
def test_vmap_of_vmap_of_packed_tokens(interleaved: bool, device: str) -> None:
    x = torch.randn(2, 4, 7, 3, 8, device=device)
    table = random_table((4, 7, 4), device=device)
    rotate = vmap(vmap(lambda x, t: op("rotate")(x, t, None, interleaved)), in_dims=(0, None))
    expected = torch.stack(
        [torch.stack([reference.rotate(x[i, j], table[j], None, interleaved) for j in range(4)]) for i in range(2)]
    )
    assert_same(rotate(x, table).contiguous(), expected)


def test_vmap_over_no_samples(device: str) -> None:
    x, tables = torch.empty(0, 2, 5, 3, 8, device=device), torch.empty(0, 5, 4, dtype=torch.complex64, device=device)
    assert vmap(lambda x: op("rotate")(x, random_table((5, 4), device=device)), randomness="same")(x).shape == x.shape
    assert vmap(op("rotate"))(x, tables).shape == x.shape


@pytest.mark.parametrize("size", (1, 3))
def test_vmap_raises_what_the_call_raises(size: int, device: str) -> None:
    x = torch.randn(size, 2, 5, 3, 8, device=device)
    short, narrow = random_table((4, 4), device=device), random_table((5, 2), device=device)
    with pytest.raises(ValueError, match=r"rope::rotate: .*4 rows for a sequence of 5"):
        vmap(lambda x: op("rotate")(x, short))(x)
    with pytest.raises(ValueError, match=r"rope::rotate: .*head_dim"):
        vmap(lambda x: op("rotate")(x[..., :5], narrow))(x)


def test_vmap_over_nothing_but_conj(device: str) -> None:
    x = torch.randn(3, 2, 5, 3, 8, device=device)
    table = random_table((5, 4), device=device)
    actual = vmap(lambda x: op("rotate")(x, table.conj()))(x)
    assert_same(actual.contiguous(), torch.stack([reference.rotate(x, table, conj=True) for x in x]))


@pytest.mark.parametrize("form", ("rotate_", "rotate_cos_sin_"))
@pytest.mark.parametrize("transform", ("grad", "vjp", "jvp", "vmap", "functionalize"))
def test_in_place_under_transforms_is_right_or_refused(transform: str, form: str, device: str) -> None:
    x = (
        torch.randn(2, 2, 5, 3, 8, device=device)[:, 0]
        if transform == "vmap"
        else torch.randn(2, 5, 3, 8, device=device)
    )
    table = random_table((5, 4), device=device)

    def function(rotate: Callable) -> Callable[[Tensor], Tensor]:
        return lambda x: rotate((x * 2).view(1, *x.shape) if x.ndim == 3 else x * 2).square().sum(-1)

    def in_place(y: Tensor) -> Tensor:
        op(form)(y, *((table,) if form == "rotate_" else (table.real, table.imag)))
        return y

    def transformed(f: Callable) -> object:
        return {
            "grad": lambda: grad(lambda x: f(x).sum())(x),
            "vjp": lambda: vjp(f, x)[1](torch.ones(2, 5, 3, device=device)),
            "jvp": lambda: jvp(f, (x,), (torch.ones_like(x),)),
            "vmap": lambda: vmap(f)(x),
            "functionalize": lambda: torch.func.functionalize(f)(x),
        }[transform]()

    expected = transformed(function(lambda y: reference.rotate(y, table)))
    try:
        actual = transformed(function(in_place))
    except RuntimeError as error:
        assert "rope::" in str(error), "refused, but without saying what"
        return
    torch.testing.assert_close(actual, expected)


def test_per_sample_gradients_of_a_module(device: str) -> None:
    """The job that vmap(grad(...)) is used for."""

    class Projection(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 24, device=device, dtype=F64)

        def forward(self, x: Tensor, rotate: Callable) -> Tensor:
            return rotate(self.linear(x).unflatten(-1, (3, 8)), table)

    module, table = Projection(), random_table((5, 4), C128, device)
    parameters, x = dict(module.named_parameters()), torch.randn(4, 5, 6, dtype=F64, device=device)

    def loss(parameters: dict, x: Tensor, rotate: Callable) -> Tensor:
        return functional_call(module, parameters, (x[None], rotate)).pow(3).sum()

    actual, expected = (vmap(lambda x, f=f: grad(loss)(parameters, x, f))(x) for f in (op("rotate"), reference.rotate))
    assert actual["linear.weight"].shape == (4, 24, 6)
    torch.testing.assert_close(actual, expected)


def test_float32_is_what_the_op_computes(device: str) -> None:
    """Under a transform as outside of one: the same kernel, the same bits."""
    x, table = place_pair("sliced", (2, 5, 3, 8), F32, device)[0], random_table((5, 4), device=device)
    out, pullback = vjp(lambda x: op("rotate")(x, table), x)
    assert_same(out, reference.rotate(x, table))
    assert_same(pullback(out)[0], reference.rotate(out, table, conj=True))


CHECKPOINTS: dict[str, dict] = {
    "full": {},
    "full-reentrant": {"use_reentrant": True},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, [op("apply")])},
}


@pytest.mark.parametrize("form", ("apply", "apply_"))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_activation_checkpointing(name: str, form: str, device: str) -> None:
    projection = torch.nn.Linear(24, 5 * 8, device=device)
    x, table = torch.randn(2, 7, 24, device=device, requires_grad=True), random_table((7, 4), device=device)

    def block(x: Tensor) -> Tensor:
        qkv = projection(x).unflatten(-1, (5, 8))
        q, k = qkv[:, :, :3], qkv[:, :, 3:]
        rotated = op(form)(q, k, table) or (q, k)
        return torch.cat(rotated, 2).square().sum()

    leaves = (x, *projection.parameters())
    block(x).backward()
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    with Calls() as calls:  # below the modes of the checkpoint, which hand it only what they do not remember
        checkpoint(block, x, **{"use_reentrant": False, **CHECKPOINTS[name]}).backward()
    remembered = name == "selective" and form == "apply"
    assert calls.names.count(f"rope.{form}.default") == (1 if remembered else 2)
    for leaf, want in zip(leaves, expected, strict=True):
        assert_same(leaf.grad, want)


def test_saved_tensors_on_the_cpu(device: str) -> None:
    x, table = torch.randn(2, 5, 3, 8, device=device, requires_grad=True), random_table((5, 4), device=device)
    (expected,) = torch.autograd.grad(op("rotate")(x, table.conj()).square().sum(), x)
    with torch.autograd.graph.save_on_cpu():
        out = op("rotate")(x, table.conj())
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert_same(grad, expected)
