"""What the CUDA kernels must do, apart from speed. Usage: behaviour.py cuda|cpu bits|behaviour|selection

A stage of gpu_check.py, which puts this repository on the PYTHONPATH.

On "cpu" it is a rehearsal: the same calls on the CPU, where a graph is replayed by calling again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cuda"))

import kernel_cases

import rope_ext
from cases import Inputs
from harness import assert_same, op, whole_storage
from rope_ext import reference

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"


def moved(x: Tensor) -> Tensor:
    """The same view of a copy of its whole storage on the device: strides, offset and lazy bits stay."""
    if x.numel() == 0:
        return x.to(DEVICE)
    plain = x.conj() if x.is_conj() else x
    plain = torch._neg_view(plain) if plain.is_neg() else plain
    there = whole_storage(plain).to(DEVICE).as_strided(plain.shape, plain.stride(), plain.storage_offset())
    there = there.conj() if x.is_conj() else there
    return torch._neg_view(there) if x.is_neg() else there


def arguments(given: Inputs) -> list[object]:
    table = given.table if isinstance(given.table, tuple) else (given.table,)
    return [given.xq, given.xk, *table, *given[3:]]


def on_device(values: list[object]) -> list[object]:
    return [moved(value) if isinstance(value, Tensor) else value for value in values]


def name_of(given: Inputs) -> str:
    return "apply_cos_sin" if isinstance(given.table, tuple) else "apply"


def bits(every: int = 1) -> None:
    """Every call of the kernel tests, functional or in place: the bits of the CPU."""
    calls = kernel_cases.all_calls()[::every]
    for call in calls:
        given = arguments(call.inputs)
        expected = op(name_of(call.inputs))(*given)
        there = on_device(given)
        results = op(name_of(call.inputs) + "_" * call.in_place)(*there)
        results = there[:2] if call.in_place else results
        for result, wanted in zip(results, expected, strict=True):
            assert_same(result.cpu(), wanted, call.name)
            assert call.in_place or result.stride() == wanted.stride(), call.name
    print(f"{len(calls)} calls have the bits of the CPU")


def inputs(tokens: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = (torch.randn(1, tokens, heads, 128, device=DEVICE).to(dtype) for heads in (8, 2))
    table = torch.randn(rows, 64, dtype=torch.complex64, device=DEVICE)
    return q, k, table, torch.randint(rows, (1, tokens), device=DEVICE)


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """What repeats `call` on the same memory: the replay of a CUDA graph."""
    if DEVICE == "cpu":
        return lambda: call() and None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # what is made once per process is not captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def graph_with_changing_positions() -> None:
    q, k, table, positions = inputs(33, 500)
    fresh_q, fresh_k = q.clone(), k.clone()
    replay = capture(lambda: torch.ops.rope.apply_(q, k, table, positions))
    for _ in range(5):
        q.copy_(fresh_q), k.copy_(fresh_k)
        positions.copy_(torch.randint(500, positions.shape))
        replay()
        for x, fresh in ((q, fresh_q), (k, fresh_k)):
            assert_same(x.cpu(), reference.rotate(fresh.cpu(), table.cpu(), positions.cpu()), "graph replay")


def side_streams() -> None:
    """Four streams at once, each with work of its own in front: the kernel must run on its own stream."""
    if DEVICE == "cpu":
        return
    work = [inputs(2000, 2000) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    results = []
    for stream, (q, k, table, positions) in zip(streams, work, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            q.mul_(2)
            results.append(torch.ops.rope.apply(q, k, table, positions))
    torch.cuda.synchronize()
    for (q, _, table, positions), (rotated, _) in zip(work, results, strict=True):
        assert_same(rotated.cpu(), reference.rotate(q.cpu(), table.cpu(), positions.cpu()), "side stream")


def above_2_to_31_elements() -> None:
    """Rows at the end of a tensor of more than 2^31 elements, and rows 2^31 elements apart."""
    tokens = 1000 if DEVICE == "cpu" else 2**31 // (16 * 128) + 1000
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 14 * 2**30:
        return print("left out: tensors above 2^31 elements need 14 GiB of free memory")
    x = torch.zeros(1, tokens, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    x[0, -3:] = torch.randn(3, 16, 128)
    table = torch.ones(tokens, 64, dtype=torch.complex64, device=DEVICE)
    table[-3:] = torch.randn(3, 64, dtype=torch.complex64)
    expected = reference.rotate(x[:, -3:].cpu(), table[-3:].cpu())
    assert_same(torch.ops.rope.rotate(x, table)[:, -3:].cpu(), expected, "above 2^31 elements")
    far = x.view(-1).as_strided((2, 1, 1, 128), (x.numel() - 128, 128, 128, 1))
    rotated = reference.rotate(far.cpu(), table[-1:].cpu())
    torch.ops.rope.rotate_(far, table[-1:])
    assert_same(far.cpu(), rotated, "rows 2^31 elements apart")


def selection() -> None:
    """Little enough to run under a checker of every memory access."""
    bits(every=23)
    graph = inputs(5, 7)
    torch.ops.rope.apply_(*graph)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def behaviour() -> None:
    for check in (graph_with_changing_positions, side_streams, above_2_to_31_elements):
        check()
        print(f"{check.__name__}: right")


if __name__ == "__main__":
    torch.manual_seed(1234)
    assert DEVICE == "cpu" or rope_ext.build_info()["cuda"], "rope_ext was built without CUDA kernels"
    {"bits": bits, "behaviour": behaviour, "selection": selection}[sys.argv[2]]()
