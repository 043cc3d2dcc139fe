"""The LLaMA of the demo compiled as a whole, warnings and the compiler's cache, and backward passes compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from benchmarks.llama import ModelArgs, RotaryFn, Transformer
from cases import F32, F64, random_table
from harness import assert_same, op
from rope_ext import reference

# SmolLM2's head_dim, pairing and ratio of queries to keys, in less of everything
ARGS = ModelArgs(dim=192, n_layers=2, n_heads=3, n_kv_heads=1, hidden_dim=160, vocab_size=307, rope_theta=1e5)
LENGTHS = (7, 1, 128, 1000)
ROWS = 1024


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """One thread, because Meta's formula may have other bits on more of them."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def in_place(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    op("apply_")(xq, xk, freqs_cis)
    return xq, xk


def cos_sin(xq: Tensor, xk: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return op("apply_cos_sin")(xq, xk, *table.unbind(-1))  # type: ignore[no-any-return]


def llama(rotary: RotaryFn, dtype: torch.dtype = F32) -> Transformer:
    """The same weights at every call; `cos_sin` gets a real table (rows, head_dim / 2, 2)."""
    torch.manual_seed(0)
    table = reference.precompute_freqs_cis(ARGS.head_dim, ROWS, ARGS.rope_theta)
    model = Transformer(ARGS, rotary, torch.view_as_real(table) if rotary is cos_sin else table).to(dtype)
    model.requires_grad_(False).setup_caches(max_batch_size=5, max_seq_len=ROWS)
    return model


def prompts(seqlen: int) -> Tensor:
    batch = 5 if seqlen < 1000 else 3  # not 2, the size of other dimensions: the compiler would tie them together
    return torch.randint(ARGS.vocab_size, (batch, seqlen))


def complex_arithmetic(graph: fx.Graph) -> list[str]:
    """The operators on complex numbers, but for ours and views of the table."""

    def is_complex(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.is_complex()

    touched = [n for n in graph.nodes if n.op == "call_function" and any(map(is_complex, (n, *n.all_input_nodes)))]
    return [str(n.target) for n in touched if "rope" not in str(n.target) and not getattr(n.target, "is_view", False)]


@pytest.mark.parametrize("rotary", (in_place, cos_sin))
def test_graphs_and_bits(rotary: RotaryFn) -> None:
    """Without code generation, the logits of Meta's formula; one recompilation, for single tokens."""
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Callable:
        graphs.append(module.graph)
        return module.forward

    compiled = torch.compile(
        llama(rotary), fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep)
    )
    expected = llama(reference.apply_rotary_emb)
    for seqlen in LENGTHS:
        tokens = prompts(seqlen)
        assert_same(compiled(tokens, 0), expected(tokens, 0), f"logits after {seqlen} tokens")
    assert len(graphs) == 2
    for graph in graphs:
        assert complex_arithmetic(graph) == []
        # in a functionalised graph the operator in place is the first argument of torch's operator for such
        assert sum("rope" in f"{node.target} {node.args[:1]}" for node in graph.nodes) == ARGS.n_layers
        has_complex = any(getattr(n.meta.get("val"), "dtype", None) == torch.complex64 for n in graph.nodes)
        assert has_complex == (rotary is not cos_sin)


def test_inductor() -> None:
    """Logits within 8 ulps of float64's, as in eager mode; batch and sequence are promised to be free sizes."""
    compiled = torch.compile(llama(op("apply")), fullgraph=True, mode="reduce-overhead")
    eager, exact = llama(op("apply")), llama(reference.apply_rotary_emb, F64)
    for seqlen in LENGTHS:
        tokens = prompts(seqlen)
        for dim in range(2 if seqlen > 1 else 1):
            torch._dynamo.mark_dynamic(tokens, dim)
        wanted = exact(tokens, 0)
        for model in (compiled, eager):
            error = (model(tokens, 0) - wanted).abs().max() / wanted.abs().max()
            assert error <= 8 * 2**-23, f"{seqlen} tokens: {error:.1e} of the largest logit"  # 2 * 2**-23 was measured
    assert counters["stats"]["unique_graphs"] == 2


QUIET_PROGRAM = """
import json, torch
from torch._dynamo.utils import counters
from rope_ext import RotaryEmbedding
rope = RotaryEmbedding(16, 64)
def step(qkv, cos, sin):
    q, k, v = qkv.split((4, 1, 1), 2)
    torch.ops.rope.apply_cos_sin_(q, k, cos, sin, None, False)
    return *rope(q, k, start=3), *torch.ops.rope.apply_cos_sin(q, k, cos, sin)
compiled = torch.compile(step, fullgraph=True)
for seqlen in (5, 9, 12):
    torch.manual_seed(seqlen)
    inputs = torch.randn(2, seqlen, 6, 16), *torch.randn(2, seqlen, 8)
    torch._dynamo.mark_dynamic(inputs[0], 1)
    torch._dynamo.mark_dynamic(inputs[1], 0), torch._dynamo.mark_dynamic(inputs[2], 0)
    twin = inputs[0].clone()
    for found, expected in zip(compiled(*inputs), step(twin, *inputs[1:]), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(inputs[0], twin)
print(json.dumps([counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def test_a_quiet_program_is_compiled_once_for_all_its_runs() -> None:
    """No warning, no graph break, no recompilation; a second process finds the graph in the cache of the first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCH_LOGS": "recompiles,graph_breaks"}
    for _ in range(2):
        command = [sys.executable, "-W", "error::UserWarning", "-c", QUIET_PROGRAM]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert (result.returncode, result.stderr) == (0, "")
        graphs, cache_hits = json.loads(result.stdout)
        assert graphs == 1
    assert cache_hits == 1


COMPILED_BACKWARDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "table": lambda x, t, ids: op("rotate")(x * 2, t, ids, False, None, True),
    "conj-view": lambda x, t, ids: op("rotate")(x * 2, t[2:].conj()),
    "cos-sin-partial": lambda x, t, ids: op("rotate_cos_sin")(x * 2, t.real[:, :3], t.imag[:, :3], ids, True, 6),
    "both": lambda x, t, ids: torch.cat(op("apply")(x * 2, x.sin(), t, ids), 2),
    "in-place": lambda x, t, ids: in_place(x * 2, t.detach(), ids),
    "offloaded": lambda x, t, ids: offloaded(op("rotate"), x * 2, t, ids),
}


def in_place(x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    op("apply_")(x[:, :, :2], x[:, :, 2:], table, ids)
    return x


def offloaded(function: Callable, *inputs: Tensor) -> Tensor:
    hooks = (
        (lambda t: (t.dtype, torch.view_as_real(t) * 2 if t.is_complex() else t.clone())),
        (lambda packed: torch.view_as_complex(packed[1] / 2) if packed[0].is_complex else packed[1]),
    )
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        return function(*inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", COMPILED_BACKWARDS)
def test_compiled_autograd_has_the_bits_of_eager(name: str) -> None:
    """One graph of the whole backward pass, for every sequence length."""
    counter = CompileCounterWithBackend("aot_eager")
    for tokens in (5, 9, 6):
        leaves = [torch.randn(2, tokens, 3, 8, requires_grad=True), random_table((11, 4)).detach()]
        leaves[1].requires_grad_(name not in ("both", "in-place"))
        ids = torch.arange(tokens) * 3 % 7

        def backward(leaves: list[Tensor] = leaves, ids: Tensor = ids) -> tuple[Tensor, ...]:
            table = leaves[1] if name != "conj-view" else leaves[1][: 2 + len(ids)]
            rotated = COMPILED_BACKWARDS[name](leaves[0], table, ids)
            return rotated.square().sum(), [x for x in leaves if x.requires_grad]

        expected = torch.autograd.grad(*backward())
        loss, wanted = backward()
        with compiled_autograd._enable(torch.compile(backend=counter, dynamic=True)):
            found = torch.autograd.grad(loss, wanted)
        for grad, want in zip(found, expected, strict=True):
            assert_same(grad.contiguous(), want.contiguous())
    assert counter.frame_count <= 2
    for graph in counter.graphs:
        assert any("RotateBackward" in str(node.target) for node in graph.graph.nodes)
