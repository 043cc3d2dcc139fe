"""What is measured: sizes, dtypes and head configurations, and the tensors of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rope_ext import reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DECODE_POSITION = 1000


@dataclass(frozen=True)
class Heads:
    q: int
    k: int
    head_dim: int
    rotary_dim: int

    def __str__(self) -> str:
        partial = f", rotary {self.rotary_dim}" if self.rotary_dim < self.head_dim else ""
        return f"{self.q}/{self.k} x {self.head_dim}{partial}"


MAIN = Heads(32, 8, 128, 128)  # Llama 3 8B
OTHERS = (Heads(9, 3, 64, 64), Heads(64, 8, 128, 128), Heads(128, 1, 192, 64))  # SmolLM2, Llama 3 70B, DeepSeek V3
GROWING = tuple(Heads(q, max(q // 4, 1), 128, 128) for q in (1, 2, 4, 8, 16, 32, 64, 128))

DECODE = (1, 8, 64, 256)
PREFILL = (128, 512, 2048, 8192, 32768)


@dataclass(frozen=True)
class Case:
    phase: str  # "decode": a batch of single tokens; "prefill": one sequence
    tokens: int
    heads: Heads
    dtype: str

    def __str__(self) -> str:
        return f"{self.phase} {self.tokens}, {self.heads}, {self.dtype}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.tokens, 1) if self.phase == "decode" else (1, self.tokens)

    @property
    def bytes(self) -> int:
        """Of q and k: what a functional call reads, and writes again."""
        h = self.heads
        return self.tokens * (h.q + h.k) * h.head_dim * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Inputs:
    """q (B, S, Hq, D), k (B, S, Hk, D), the table (S, R/2) complex64, and what is known to be right."""

    q: Tensor
    k: Tensor
    freqs_cis: Tensor
    neighbours: tuple[Tensor, Tensor]
    halves: tuple[Tensor, Tensor]


def inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.tokens)
    (batch, seqlen), h = case.shape, case.heads
    q, k = (
        torch.randn(batch, seqlen, heads, h.head_dim, generator=generator).to(DTYPES[case.dtype])
        for heads in (h.q, h.k)
    )
    start = DECODE_POSITION if case.phase == "decode" else 0
    freqs_cis = reference.precompute_freqs_cis(h.rotary_dim, start + seqlen)[start:].clone()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference has the same bits everywhere on one thread only
    if h.rotary_dim == h.head_dim:
        neighbours = reference.apply_rotary_emb(q, k, freqs_cis)
    else:
        neighbours = reference.apply(q, k, freqs_cis, None, True, h.rotary_dim)
    halves = reference.apply(q, k, freqs_cis, None, False, h.rotary_dim)
    torch.set_num_threads(threads)
    return Inputs(q, k, freqs_cis, neighbours, halves)
