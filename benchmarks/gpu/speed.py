"""Times the CUDA kernels. Usage: speed.py cuda|cpu. One JSON line per measurement goes to the file $GPU_CHECK_ROWS.
A stage of gpu_check.py, which puts this repository on the PYTHONPATH.

Every measurement runs over as many sets of buffers as it takes to leave the L2 behind, in a CUDA graph, so that neither
a warm cache nor the launch of a kernel from Python flatters or hides anything; what cannot be captured is timed as it
is called. Each contender is compared with the formula before it is timed. The floor of a call is a copy of the same
bytes, and for a few tokens the smallest kernel there is. On "cpu" it is a rehearsal with tiny sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import rotate_hf
from rope_ext import reference

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
ON_GPU = DEVICE == "cuda"
ROWS = Path(os.environ.get("GPU_CHECK_ROWS", os.devnull))
END = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", "190"))
TOKENS = (8192, 1, 65536, 1024, 64, 8, 256) if ON_GPU else (1, 8)  # the telling ones first: time may run out
HEADS = ((32, 8), (8, 1), (64, 8))
HEAD_DIMS = (128, 64, 256)
ROUNDS, SECONDS = 5, 0.01  # of a measurement; each round at least this long


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens} tokens, {self.heads[0]}/{self.heads[1]} heads x {self.head_dim}, {dtype}"

    @property
    def bytes(self) -> int:
        return self.tokens * sum(self.heads) * self.head_dim * self.dtype.itemsize


def cases() -> Iterator[Case]:
    """Every size of the main configuration, then the others, then float32."""
    for heads in HEADS:
        for head_dim in HEAD_DIMS:
            yield from (Case(tokens, heads, head_dim) for tokens in TOKENS)
    yield from (Case(tokens, HEADS[0], HEAD_DIMS[0], torch.float32) for tokens in TOKENS)


@dataclass
class Buffers:
    """One set: q (1, S, Hq, D), k (1, S, Hk, D), the table of all tokens, and where each of them is in it."""

    q: Tensor
    k: Tensor
    table: Tensor
    positions: Tensor
    cos: Tensor  # (1, S, D) in the dtype of q, as Hugging Face has it
    sin: Tensor
    cos_sin: Tensor  # (S, D) float32, cosines before sines, as vLLM and FlashInfer have it
    forward: tuple[Any, Any] | None = None  # outputs and leaves, for the backward

    @classmethod
    def random(cls, case: Case) -> Buffers:
        q, k = (torch.randn(1, case.tokens, heads, case.head_dim, device=DEVICE).to(case.dtype) for heads in case.heads)
        table = reference.precompute_freqs_cis(case.head_dim, case.tokens).to(DEVICE)
        cos, sin = (part.repeat(1, 2).to(case.dtype)[None] for part in (table.real, table.imag))
        positions = torch.arange(case.tokens, device=DEVICE)
        return cls(q, k, table, positions, cos, sin, torch.cat((table.real, table.imag), -1).contiguous())


Call = Callable[[Buffers], Any]


@dataclass(frozen=True)
class Contender:
    name: str
    call: Call
    pairing: bool | None = None  # interleaved or not; None: no rotation, nothing to compare
    heads_first: bool = False  # the result is (B, H, S, D)
    in_place: bool = False
    captured: bool = True


def ours() -> Iterator[Contender]:
    op = torch.ops.rope
    yield Contender("copy", lambda b: (b.q.clone(), b.k.clone()))
    yield Contender("the smallest kernel", lambda b: b.positions[:1].add_(0))
    for interleaved, name in ((True, "neighbours"), (False, "halves")):
        yield Contender(f"apply, {name}", lambda b, i=interleaved: op.apply(b.q, b.k, b.table, None, i), interleaved)
        yield Contender(
            f"apply_, {name}, positions",
            lambda b, i=interleaved: op.apply_(b.q, b.k, b.table, b.positions, i),
            interleaved,
            in_place=True,
        )
    yield Contender("apply_cos_sin, halves, bf16 table", lambda b: op.apply_cos_sin(b.q, b.k, *half(b), None, False))
    yield Contender("backward, neighbours", backward, captured=False)


def half(b: Buffers) -> tuple[Tensor, Tensor]:
    return b.cos[0, :, : b.cos.shape[-1] // 2], b.sin[0, :, : b.sin.shape[-1] // 2]


def backward(b: Buffers) -> tuple[Tensor, ...]:
    """Of a forward made once for each set of buffers."""
    if b.forward is None:
        leaves = [x.detach().requires_grad_() for x in (b.q, b.k)]
        b.forward = torch.ops.rope.apply(*leaves, b.table), leaves
    outputs, leaves = b.forward
    return torch.autograd.grad(outputs, leaves, (b.q, b.k), retain_graph=True)


def today() -> Iterator[Contender]:
    def llama(b: Buffers, function: Callable[..., Any] = reference.apply_rotary_emb) -> Any:
        return function(b.q, b.k, b.table)

    def hugging_face(b: Buffers, function: Callable[..., Any] = rotate_hf) -> Any:
        return function(b.q.transpose(1, 2), b.k.transpose(1, 2), b.cos, b.sin)

    yield Contender("eager LLaMA", llama, True)
    yield Contender("eager Hugging Face", hugging_face, False, heads_first=True)
    if ON_GPU:
        compiled_llama, compiled_hf = (torch.compile(f) for f in (reference.apply_rotary_emb, rotate_hf))
        yield Contender("compiled LLaMA", lambda b: llama(b, compiled_llama), True)
        yield Contender("compiled Hugging Face", lambda b: hugging_face(b, compiled_hf), False, heads_first=True)


def peers() -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Each is made only if it can be imported."""

    def liger() -> Contender:
        from liger_kernel.ops.rope import LigerRopeFunction

        def call(b: Buffers) -> Any:
            return LigerRopeFunction.apply(b.q.transpose(1, 2), b.k.transpose(1, 2), b.cos, b.sin)

        return Contender("Liger", call, False, heads_first=True)

    def flash_attention() -> Contender:
        from flash_attn.layers.rotary import apply_rotary_emb

        return Contender("flash-attn", lambda b: tuple(apply_rotary_emb(x, *half(b)) for x in (b.q, b.k)), False)

    def vllm() -> Contender:
        import vllm._custom_ops

        def call(b: Buffers) -> None:
            q, k = b.q[0].flatten(1), b.k[0].flatten(1)
            vllm._custom_ops.rotary_embedding(b.positions, q, k, b.q.shape[-1], b.cos_sin.to(b.q.dtype), True)

        return Contender("vLLM", call, False, in_place=True)

    def flashinfer() -> Contender:
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace as rotate

        def call(b: Buffers) -> None:
            rotate(b.positions, b.q[0].flatten(1), b.k[0].flatten(1), b.q.shape[-1], b.cos_sin, True)

        return Contender("FlashInfer", call, False, in_place=True)

    return iter({"Liger": liger, "flash-attn": flash_attention, "vLLM": vllm, "FlashInfer": flashinfer}.items())


# ---- measuring


def check(contender: Contender, case: Case) -> None:
    """Raises ValueError where the result is not the rotation, within two roundings of the largest value."""
    if contender.pairing is None:
        return
    b = Buffers.random(Case(min(case.tokens, 64), case.heads, case.head_dim, case.dtype))
    wanted = reference.apply(b.q, b.k, b.table, None, contender.pairing)
    found = contender.call(b)
    found = (b.q, b.k) if contender.in_place else found
    for x, y in zip(found, wanted, strict=True):
        x = x.transpose(1, 2) if contender.heads_first else x
        error = (x.float() - y.float()).abs().max() / y.float().abs().max()
        if not error <= 4 * torch.finfo(case.dtype).eps:
            raise ValueError(f"its result is wrong by {error:.1e} of the largest value")


def sets_of(case: Case) -> list[Buffers]:
    """Enough that each comes back cold: twice the L2, and at most a quarter of the memory."""
    if not ON_GPU:
        return [Buffers.random(case)]
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    most = torch.cuda.mem_get_info()[0] // 4 // (case.bytes * 6)
    return [Buffers.random(case) for _ in range(max(1, min(2 * l2 // case.bytes + 2, most, 200)))]


def microseconds(contender: Contender, sets: list[Buffers]) -> float:
    """Of one call: the median of some rounds, each over all sets."""

    def once() -> list[Any]:
        return [contender.call(b) for b in sets]  # kept to the end: outputs must not share memory that stays in the L2

    for b in sets[:2]:  # compiles, and finds what cannot run
        contender.call(b)
    if not ON_GPU:
        start = time.perf_counter()
        once()
        return (time.perf_counter() - start) / len(sets) * 1e6
    replay: Callable[[], Any] = once
    if contender.captured:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            once()
        replay = graph.replay
    replay()

    def timed(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times / 1e3

    times = max(1, int(SECONDS / max(timed(1), 1e-6)))
    return statistics.median(timed(times) for _ in range(ROUNDS)) / len(sets) * 1e6


def keep(case: Case, name: str, **facts: Any) -> None:
    row = {"case": str(case), "name": name, "bytes": case.bytes} | facts
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{case}: {name}: {facts}", flush=True)


def measure(contender: Contender, case: Case, sets: list[Buffers]) -> None:
    try:
        check(contender, case)
        keep(case, contender.name, us=microseconds(contender, sets))
    except Exception as error:
        if ON_GPU:
            torch.cuda.synchronize()
        keep(case, contender.name, left_out=f"{type(error).__name__}: {str(error).strip()[:160]}")


def main() -> None:
    main_case = Case(TOKENS[0], HEADS[0], HEAD_DIMS[0])
    others = list(today())
    for name, make in peers():
        try:
            others.append(make())
        except Exception as error:
            keep(main_case, name, left_out=f"cannot be imported: {type(error).__name__}")
    for case in cases():
        main_heads = (case.heads, case.head_dim, case.dtype) == (HEADS[0], HEAD_DIMS[0], torch.bfloat16)
        contenders = [*ours(), *(others if main_heads else [])]  # a compiled one takes seconds for every size
        sets = sets_of(case)
        for contender in contenders:
            if time.monotonic() > END:
                return print("out of time: the remaining sizes are left out")
            measure(contender, case, sets)
        del sets


if __name__ == "__main__":
    main()
