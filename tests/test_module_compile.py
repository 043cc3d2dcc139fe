"""``RotaryEmbedding`` under torch.compile, torch.export and CUDA graphs: the table is a constant of the graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from rope_ext.module import RotaryEmbedding
from rope_ext.tables import mrope_interleaved
from test_module import DIM, assert_equal, qk, scaling_of


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TwoLayers(nn.Module):
    """As Gemma's: two tables in one graph, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.full = RotaryEmbedding(DIM, 32, 1e6, scaling={"rope_type": "linear", "factor": 8.0})
        self.sliding = RotaryEmbedding(DIM, 32)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.sliding(*self.full(*self.sliding(q, k, positions), positions), positions)


def test_first_use_growth_and_decode_in_one_compiled_module() -> None:
    """The table is made while the compiler traces. One compilation for all prompts, one for single tokens, then one
    for each doubling of the table."""
    counter = CompileCounterWithBackend("aot_eager")
    rope = RotaryEmbedding(DIM, 32)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
    for tokens, start in ((7, 0), (9, 0), (20, 0), (4, 28), (1, 9), (1, 10), (1, 31)):
        q, k = qk(2, tokens)
        assert_equal(compiled(q, k, start=start), rope(q, k, start=start))
    assert counter.frame_count == 2
    for tokens, start in ((40, 0), (5, 50), (33, 31)):
        q, k = qk(2, tokens)
        assert_equal(compiled(q, k, start=start), rope(q, k, start=start))
    assert counter.frame_count == 3


def test_inductor_has_eagers_bits_and_nothing_to_warn_of() -> None:
    model, (q, k) = TwoLayers(), qk(2, 9)
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6], [*range(20, 29)]])
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*complex.*")
        assert_equal(compiled(q, k), model(q, k))
        assert_equal(compiled(q, k, positions), model(q, k, positions))


def test_the_compilers_cuda_graphs_need_not_copy_the_table() -> None:
    """Its address counts as static, as a parameter's does; ``q``'s does not."""
    static = {}

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                shape = tuple(node.meta["example_value"].shape)
                static[shape] = "_dynamo_static_input_type" in node.meta["tensor_dict"]
        return graph

    q, _ = qk(2, 5)
    torch.compile(RotaryEmbedding(DIM, 32), fullgraph=True, backend=backend)(q, q)
    assert static == {tuple(q.shape): False, (32, DIM // 2, 2): True}


def test_training_through_inductor() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 32), qk(2, 9)
    gradients = []
    for function in (rope, torch.compile(rope, fullgraph=True)):
        leaf = q.clone().requires_grad_()
        sum(x.square().sum() for x in function(leaf, k, start=5)).backward()  # type: ignore[union-attr]
        gradients.append(leaf.grad)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-6, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
@pytest.mark.parametrize("exact", [False, True])
def test_length_dependent_methods_compile(name: str, exact: bool) -> None:
    """One graph for short and long sequences alike: no value is read."""
    counter = CompileCounterWithBackend("aot_eager")
    rope = RotaryEmbedding(DIM, 32, scaling=scaling_of(name), exact=exact)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
    for first in ([0, 0], [2000, 5], [1020, 3000]):
        q, k = qk(2, 6)
        positions = torch.tensor(first)[:, None] + torch.arange(6)
        assert_equal(compiled(q, k, positions), rope(q, k, positions))
    assert counter.frame_count == 1
    for start in (3, 2000):
        assert_equal(compiled(q, k, start=start), rope(q, k, start=start))


def test_position_axes_compile() -> None:
    rope = RotaryEmbedding(DIM, 32, axis_map=mrope_interleaved([4, 2, 2]))
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        q, k = qk(2, tokens)
        positions = torch.randint(0, 5000, (3, 2, tokens))
        assert_equal(compiled(q, k, positions), rope(q, k, positions))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("used_before", [False, True])
def test_export(strict: bool, with_positions: bool, used_before: bool) -> None:
    model, (q, k) = TwoLayers(), qk(2, 5)
    positions = torch.randint(0, 32, (2, 5))
    arguments = (q, k, positions) if with_positions else (q, k)
    if used_before:
        model(*arguments)
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=2, max=32)
    shapes = ({0: batch, 1: tokens},) * len(arguments)
    program = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=strict).run_decompositions()
    q, k = qk(3, 11)
    arguments = (q, k, torch.randint(0, 32, (3, 11))) if with_positions else (q, k)
    assert_equal(program.module()(*arguments), model(*arguments))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


@needs_cuda
def test_cuda_graph_survives_growth() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 32), qk(2, 1, device="cuda")
    positions = torch.tensor([[3], [31]], device="cuda")
    rope(q, k, positions)  # makes the table
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(q, k, positions)
    rope(q, k, start=500)  # a longer table beside it
    positions.copy_(torch.tensor([[7], [8]]))
    graph.replay()
    assert_equal(out, rope(q, k, positions))


@needs_cuda
def test_no_table_is_made_during_capture() -> None:
    rope, (q, k) = RotaryEmbedding(DIM, 33), qk(2, 1, device="cuda")
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        rope(q, k)
    torch.cuda.synchronize()
    assert torch.isfinite(rope(q, k)[0]).all()
