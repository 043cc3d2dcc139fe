"""torch.compile: the operator in a graph, at other sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from cases import BF16, place_pair, random_table, unit_table
from harness import assert_same, op
from rope_ext import reference


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(torch.nn.Module):
    """A projection, the rotation and causal attention: what a decoder layer does around the operator."""

    def __init__(self, rotate: Callable) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.rotate = rotate
        self.qkv = torch.nn.Linear(24, 6 * 16)

    def forward(self, x: Tensor, *table: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, 16)).split((4, 1, 1), 2)
        q, k = self.rotate(q, k, *table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


COMPILED_FORMS = {
    # the operator, its reference, and its arguments beside q and k for a table of 150 rows
    "apply": (lambda t, s: (t[3 : 3 + s],), op("apply"), reference.apply),
    "apply_cos_sin": (
        lambda t, s: (t.real[3 : 3 + s], t.imag[3 : 3 + s]),
        op("apply_cos_sin"),
        reference.apply_cos_sin,
    ),
    "positions": (lambda t, s: (t, torch.arange(s) % 9), op("apply"), reference.apply),
}


@pytest.mark.parametrize("form", COMPILED_FORMS)
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compile_with_dynamic_shapes(form: str, backend: str) -> None:
    arguments, rotate, expected = COMPILED_FORMS[form]
    counter = CompileCounterWithBackend(backend)
    table = unit_table(16, 0, 150)
    compiled = torch.compile(Attention(rotate), fullgraph=True, dynamic=True, backend=counter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, seqlen in ((2, 7), (2, 9), (3, 128), (1, 33)):
            x = torch.randn(batch, seqlen, 24)
            inputs = (x, *arguments(table, seqlen))
            torch.testing.assert_close(compiled(*inputs), Attention(expected)(*inputs), rtol=1e-5, atol=1e-5)
    assert not [w for w in caught if "complex" in str(w.message).lower()]
    assert counter.frame_count <= 3
    for graph in counter.graphs:
        assert any("rope" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def test_inductor_has_the_bits_of_eager() -> None:
    qkv = torch.randn(2, 9, 7, 80).to(BF16)
    table = random_table((9, 40))

    def function(qkv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = qkv.split((4, 2, 1), 2)
        return torch.ops.rope.apply(q, k, table)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for out, want in zip(compiled(qkv, table), function(qkv, table), strict=True):
        assert out.stride() == want.stride()
        assert_same(out, want)


def test_compiled_gradients() -> None:
    def loss(x: Tensor, table: Tensor, rotate: Callable) -> Tensor:
        return rotate(x * 2, table, None, False).square().mul(torch.arange(8)).sum()

    x, table = place_pair("dense", (2, 5, 3, 8))[0], random_table((5, 4))
    compiled = torch.compile(lambda x, t: loss(x, t, torch.ops.rope.rotate), fullgraph=True, dynamic=True)
    leaf, expected = (x.detach().clone().requires_grad_() for _ in range(2))
    compiled(leaf, table).backward()
    loss(expected, table, reference.rotate).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("form", ("apply_", "apply_cos_sin_"))
def test_compile_in_place(form: str, backend: str) -> None:
    table = random_table((9, 8))
    tables = (table.real.clone(), table.imag.clone()) if "cos_sin" in form else (table.clone(),)

    def function(x: Tensor, *tables: Tensor) -> Tensor:
        q, k, v = (x * 2).split((4, 1, 1), 2)
        op(form)(q, k, *tables)
        return torch.cat((q, k, v), 2) + 1

    def on_an_input(x: Tensor, *tables: Tensor) -> None:
        op(form)(x[:, :, :4], x[:, :, 4:], *tables)

    x = torch.randn(2, 9, 6, 16)
    assert_same(
        torch.compile(function, fullgraph=True, dynamic=True, backend=backend)(x, *tables), function(x, *tables)
    )
    compiled, eager = x.clone(), x.clone()
    torch.compile(on_an_input, fullgraph=True, dynamic=True, backend=backend)(compiled, *tables)
    on_an_input(eager, *tables)
    assert_same(compiled, eager)
    assert not compiled.equal(x)


@pytest.mark.parametrize("form", ("apply_", "apply_cos_sin_"))
def test_a_fused_buffer_is_rotated_where_it_stands(form: str) -> None:
    """The generated code has one buffer, the projection's own, and no kernel that copies into or out of it."""
    projection, table = torch.nn.Linear(24, 7 * 16, bias=False).requires_grad_(False), random_table((9, 8)).contiguous()
    tables = (table.real.clone(), table.imag.clone()) if "cos_sin" in form else (table,)

    def function(x: Tensor, *tables: Tensor) -> Tensor:
        qkv = projection(x).unflatten(-1, (7, 16))
        op(form)(qkv[:, :, :4], qkv[:, :, 4:6], *tables)
        return qkv

    x = torch.randn(2, 9, 24)
    out, (code,) = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=True), x, *tables)
    assert_same(out, function(x, *tables))
    assert code.count("torch.ops.rope.apply_cos_sin_.default(") == 1
    assert code.count("= empty_strided_cpu(") == 1 and "cpp_fused" not in code and ".copy_(" not in code


def test_in_place_at_offsets_that_are_not_constants() -> None:
    """Heads first, k begins where q's last sequence ends: torch 2.13 loses an offset that grows with the sequence."""

    def function(heads_first: Tensor, cos: Tensor, sin: Tensor) -> None:
        op("rotate_cos_sin_")(heads_first[:, 4:].transpose(1, 2), cos, sin)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for tokens in (9, 12):
        x, table = torch.randn(2, 6, tokens, 16), random_table((tokens, 8))
        expected = x.clone()
        for f, buffer in ((function, expected), (compiled, x)):
            f(buffer, table.real.clone(), table.imag.clone())
        assert_same(x, expected)


def test_in_place_on_a_part_of_fixed_size_of_a_dynamic_buffer() -> None:
    def function(buffer: Tensor, table: Tensor) -> None:
        op("apply_")(buffer[:1, :, :4], buffer[1:2, :, 4:], table)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for batch in (3, 5):
        buffer, table = torch.randn(batch, 9, 6, 16), random_table((9, 8)).contiguous()
        torch._dynamo.mark_dynamic(buffer, 0)
        expected = buffer.clone()
        function(expected, table)
        compiled(buffer, table)
        assert_same(buffer, expected)


def test_a_compiled_call_refuses_what_an_eager_one_does() -> None:
    compiled = torch.compile(
        lambda x, t: torch.ops.rope.rotate(x, t), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    x = torch.randn(2, 5, 3, 8)
    compiled(x, random_table((5, 4)))
    for wrong in (random_table((6, 4)), random_table((1, 4)), random_table((5, 3)), torch.randn(5, 4)):
        with pytest.raises(Exception, match=r"rope::rotate: freqs_cis must|rope::rotate: the last dimension"):
            compiled(x, wrong)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compile_with_sizes_known_only_at_run_time(backend: str) -> None:
    """Packed tokens chosen by a mask: their number is a symbol without a value."""

    def function(x: Tensor, mask: Tensor, table: Tensor, rotate: Callable) -> Tensor:
        positions = torch.arange(mask.shape[1]).expand_as(mask)[mask]
        return rotate(x[mask], table, positions)

    x, table = torch.randn(3, 7, 2, 16), random_table((11, 8)).contiguous()
    compiled = torch.compile(
        lambda *a: function(*a, torch.ops.rope.rotate), fullgraph=True, dynamic=True, backend=backend
    )
    for threshold in (0.5, 0.2):
        mask = torch.rand(3, 7) > threshold
        assert_same(compiled(x, mask, table), function(x, mask, table, reference.rotate))
