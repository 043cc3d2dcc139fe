"""An attention block under torch.compile: the operator, which Inductor calls, against formulas, which it fuses.

Projections, rotation, key-value cache, attention, output projection; the rotation is what differs. Without it the block
is the floor, so that the rest can be subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import DTYPES, Case, Heads
from benchmarks.contenders import Contender, Pair, rotate_hf
from rope_ext import reference

SMOLLM2, LLAMA_1B = Heads(9, 3, 64, 64), Heads(32, 8, 64, 64)
WIDTH = {SMOLLM2: 576, LLAMA_1B: 2048}
CACHED = 512  # tokens before a decoded one, and tokens of a prefill
CASES = [
    Case(f"block {phase}", n, heads, dtype)
    for heads, dtype in ((SMOLLM2, "bf16"), (SMOLLM2, "fp32"), (LLAMA_1B, "bf16"))
    for phase, n in (("decode", 1), ("prefill", CACHED))
]

Rotate = Callable[[Tensor, Tensor, dict[str, Tensor]], Pair]


def heads_first_formula(q: Tensor, k: Tensor, t: dict[str, Tensor]) -> Pair:
    q, k = rotate_hf(q.transpose(1, 2), k.transpose(1, 2), t["cos_hf"], t["sin_hf"])
    return q.transpose(1, 2), k.transpose(1, 2)


def in_place(q: Tensor, k: Tensor, t: dict[str, Tensor]) -> Pair:
    torch.ops.rope.apply_cos_sin_(q, k, t["cos"], t["sin"])
    return q, k


ROTATIONS: dict[str, Rotate] = {
    "no rotation": lambda q, k, t: (q, k),
    "rope::apply": lambda q, k, t: torch.ops.rope.apply(q, k, t["freqs_cis"]),
    "rope::apply_cos_sin": lambda q, k, t: torch.ops.rope.apply_cos_sin(q, k, t["cos"], t["sin"]),
    "rope::apply_cos_sin_": in_place,
    "LLaMA formula": lambda q, k, t: reference.apply_rotary_emb(q, k, t["freqs_cis"]),
    "real formula": lambda q, k, t: reference.apply_cos_sin(q, k, t["cos"], t["sin"]),
    "HF formula": heads_first_formula,
}


def attention(rotate: Rotate, h: Heads) -> Callable[..., Tensor]:
    def block(x: Tensor, w: dict[str, Tensor], cache: Pair, start: int, t: dict[str, Tensor]) -> Tensor:
        shape = (*x.shape[:2], -1, h.head_dim)
        q, k, v = (F.linear(x, w[name]).view(shape) for name in "qkv")
        q, k = rotate(q, k, t)
        end = start + x.shape[1]
        for past, new in zip(cache, (k, v), strict=True):
            past[:, start:end] = new
        q, k, v = (part.transpose(1, 2) for part in (q, cache[0][:, :end], cache[1][:, :end]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), w["o"])

    return block


def entrants(case: Case) -> Iterator[Contender]:
    """The block compiled around each rotation, over the same weights; each first run against eager on the same bits."""
    torch.manual_seed(1)
    h, dtype, width = case.heads, DTYPES[case.dtype], WIDTH[case.heads]
    start = CACHED if case.phase == "block decode" else 0
    rows = {"q": h.q * h.head_dim, "k": h.k * h.head_dim, "v": h.k * h.head_dim}
    w = {name: (torch.randn(n, width) / width**0.5).to(dtype) for name, n in rows.items()}
    w["o"] = (torch.randn(width, rows["q"]) / rows["q"] ** 0.5).to(dtype)
    cache = tuple(torch.randn(1, start + case.tokens, h.k, h.head_dim).to(dtype) for _ in "kv")
    table = reference.precompute_freqs_cis(h.rotary_dim, start + case.tokens)[start:].clone()
    cos, sin = table.real.contiguous(), table.imag.contiguous()
    t = {"freqs_cis": table, "cos": cos, "sin": sin}
    t |= {"cos_hf": cos.repeat(1, 2).to(dtype)[None], "sin_hf": sin.repeat(1, 2).to(dtype)[None]}
    x = torch.randn(1, case.tokens, width).to(dtype)

    torch._dynamo.reset()
    for name, rotate in ROTATIONS.items():
        eager = attention(rotate, h)
        compiled: Any = torch.compile(eager, fullgraph=True, dynamic=False)
        arguments = (x, w, cache, start, t)
        names = {"f": compiled, "x": x, "w": w, "cache": cache, "start": start, "t": t}
        wanted, found = eager(*arguments).float(), compiled(*arguments).float()
        if not (found - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * wanted.abs().max():
            raise RuntimeError(f"the compiled block with {name} does not compute what the eager one does")
        yield Contender(name, "block", "f(x, w, cache, start, t)", names, result=None)
