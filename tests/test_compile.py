"""torch.compile, torch.export and AOTInductor: the operator in a graph, at other sizes, in another process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from cases import BF16, place_pair, random_table, unit_table
from harness import assert_same, op
from rope_ext import reference


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
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


LOAD_AND_RUN = """
import sys, torch, rope_ext
from rope_ext import reference
exported, inputs = torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2])
for x, *rest in inputs:
    q, k = exported(x, *rest)
    for out, want in zip((q, k), reference.apply(*(x * 2).split((3, 2), 2), *rest), strict=True):
        assert torch.equal(out, want)
print("equal", len(inputs))
"""


class Rotate(torch.nn.Module):
    def forward(self, x: Tensor, table: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k = (x * 2).split((3, 2), 2)
        return torch.ops.rope.apply(q, k, table, positions)


@pytest.mark.parametrize("with_positions", (False, True), ids=("rows", "positions"))
def test_export_then_run_in_a_new_process(with_positions: bool, tmp_path: Path) -> None:
    def inputs(batch: int, seqlen: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, seqlen, 5, 16)
        if with_positions:
            return x, random_table((11, 8)).contiguous(), torch.randint(11, (batch, seqlen))
        return x, random_table((seqlen, 8)).contiguous()

    batch, seqlen = Dim("batch"), Dim("seqlen")
    shapes = ({0: batch, 1: seqlen}, *(({}, {0: batch, 1: seqlen}) if with_positions else ({0: seqlen}, None)))
    program = export(Rotate(), inputs(2, 7), dynamic_shapes=shapes[: 2 + with_positions])
    decomposed = program.run_decompositions()
    for each in (program, decomposed):
        assert any(node.target is op("apply") for node in each.graph.nodes)
    torch.export.save(decomposed, tmp_path / "rotate.pt2")
    torch.save([inputs(3, 9), inputs(1, 33), inputs(5, 2)], tmp_path / "inputs.pt")
    command = [sys.executable, "-c", LOAD_AND_RUN, str(tmp_path / "rotate.pt2"), str(tmp_path / "inputs.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout == "equal 3\n", result.stderr


def test_aot_inductor(tmp_path: Path) -> None:
    batch, seqlen = Dim("batch", max=64), Dim("seqlen", max=64)
    inputs = (torch.randn(2, 7, 5, 16), random_table((7, 8)).contiguous())
    program = export(Rotate(), inputs, dynamic_shapes=({0: batch, 1: seqlen}, {0: seqlen}, None)[:2])
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rotate.pt2"))
    runner = torch._inductor.aoti_load_package(package)
    for shape in ((2, 7), (3, 9)):
        x, table = torch.randn(*shape, 5, 16), random_table((shape[1], 8)).contiguous()
        for out, want in zip(runner(x, table), reference.apply(*(x * 2).split((3, 2), 2), table), strict=True):
            assert_same(out, want)


@pytest.mark.parametrize("form", ("rotate_", "rotate_cos_sin_"))
def test_export_in_place(form: str) -> None:
    class InPlace(torch.nn.Module):
        def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
            y = x * 2
            op(form)(y, *tables)
            return y

    table = random_table((5, 4)).contiguous()
    tables = (table,) if form == "rotate_" else (table.real.clone(), table.imag.clone())
    dynamic_shapes = ({0: Dim("batch")}, tuple({} for _ in tables))
    program = export(InPlace(), (torch.randn(2, 5, 3, 8), *tables), dynamic_shapes=dynamic_shapes)
    x = torch.randn(4, 5, 3, 8)
    for each in (program, program.run_decompositions()):
        assert_same(each.module()(x, *tables), reference.rotate(x * 2, table))
