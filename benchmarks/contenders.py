"""Who is measured: the operator, the floors below it, and what users of torch have today.

A contender is an expression over its own names, timed as it stands: no wrapper is timed with it. Each is run once and
its result compared before it is timed, so that nobody is fast at something else.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import load

import rope_ext
from benchmarks.cases import Case, Inputs
from rope_ext import reference

ROOT = Path(__file__).resolve().parents[1]
CLONES, NEG = "two clones", "two neg_"

Pair = tuple[Tensor, Tensor]


class LeftOut(Exception):
    """A contender that cannot run here, and why."""


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # "floor", "ours", "today" or "peer"
    statement: str
    names: dict[str, Any]
    in_place: bool = False
    exact: bool = False  # its bits must be those of the reference
    pairing: str = "neighbours"
    result: Callable[[Any], Pair] | None = lambda value: value  # of the statement, as (B, S, H, D); None: no rotation
    wanted: Pair | None = None  # where it is not the case's own rotation
    threads: int | None = None


# ---- floors


@cache
def floors_library() -> Any:
    folder = ROOT / "build" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")  # ninja of this environment, activated or not
    load(
        name="rope_floors",
        sources=[str(Path(__file__).with_name("floors.cpp"))],
        extra_cflags=["-O3", "-fopenmp"],
        build_directory=str(folder),
        is_python_module=False,
    )
    return torch.ops.rope_floor


def floors(x: Inputs) -> Iterator[Contender]:
    op = floors_library()
    yield Contender(CLONES, "floor", "(q.clone(), k.clone())", {"q": x.q, "k": x.k}, result=None)
    own = {"q": x.q.clone(), "k": x.k.clone(), "t": x.freqs_cis, "yq": x.q.clone(), "yk": x.k.clone()}
    yield Contender(NEG, "floor", "(q.neg_(), k.neg_())", own, in_place=True, result=None)
    yield Contender("empty op, 2 outputs", "floor", "f(q, k, t)", own | {"f": op.allocate}, result=None)
    yield Contender("empty op", "floor", "f(q, k, t)", own | {"f": op.nothing_}, in_place=True, result=None)
    for name, streaming in (("memcpy, warm buffers", False), ("streaming copy, warm buffers", True)):
        names = own | {"f": op.copy_, "streaming": streaming}
        yield Contender(name, "floor", "f(yq, yk, q, k, streaming)", names, result=None)


# ---- the operator


def ours(case: Case, x: Inputs) -> Iterator[Contender]:
    partial = case.heads.rotary_dim if case.heads.rotary_dim < case.heads.head_dim else None
    names: dict[str, Any] = {"q": x.q, "k": x.k, "t": x.freqs_cis, "r": partial, "f": torch.ops.rope.apply}
    call = "f(q, k, t)" if partial is None else "f(q, k, t, None, True, r)"
    yield Contender("rope::apply", "ours", call, names, exact=True)
    if partial is None:
        names = names | {"f": rope_ext.apply_rotary_emb}
        yield Contender("apply_rotary_emb", "ours", "f(q, k, t)", names, exact=True)
    names = names | {"f": torch.ops.rope.apply}
    halves = "f(q, k, t, None, False)" if partial is None else "f(q, k, t, None, False, r)"
    yield Contender("rope::apply, halves", "ours", halves, names, exact=True, pairing="halves")
    names = names | {"q": x.q.clone(), "k": x.k.clone(), "f": torch.ops.rope.apply_}
    own = (names["q"], names["k"])
    yield Contender("rope::apply_", "ours", call, names, in_place=True, exact=True, result=lambda _: own)
    yield at_positions(case, x)


def at_positions(case: Case, x: Inputs) -> Contender:
    """As in serving: in place, every sample of a decode batch somewhere else in one long table."""
    h, (batch, seqlen) = case.heads, case.shape
    table = reference.precompute_freqs_cis(h.rotary_dim, max(2048, seqlen))
    positions = torch.arange(seqlen).expand(batch, seqlen)
    if case.phase == "decode":
        positions = (7 * torch.arange(batch)).unsqueeze(1)
    q, k, p = x.q.clone(), x.k.clone(), positions.contiguous()
    wanted = reference.apply(q, k, table, p, True, h.rotary_dim)
    names = {"q": q, "k": k, "t": table, "p": p, "r": h.rotary_dim, "f": torch.ops.rope.apply_}
    call = "f(q, k, t, p)" if h.rotary_dim == h.head_dim else "f(q, k, t, p, True, r)"
    name = "rope::apply_, positions"
    return Contender(name, "ours", call, names, in_place=True, exact=True, result=lambda _: (q, k), wanted=wanted)


# ---- what users of torch have


def rotate_half(x: Tensor) -> Tensor:
    """As in Hugging Face's models: (a, b) -> (-b, a), where a and b are the halves of a head."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_hf(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Hugging Face's rotation of heads-first (B, H, S, D) tensors, with (B, S, D) tables in their dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotate_hf_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    r = cos.shape[-1]
    heads = rotate_hf(q[..., :r], k[..., :r], cos, sin)
    return torch.cat((heads[0], q[..., r:]), -1), torch.cat((heads[1], k[..., r:]), -1)


def rotate_llama_partial(q: Tensor, k: Tensor, freqs_cis: Tensor) -> Pair:
    r = 2 * freqs_cis.shape[-1]
    heads = reference.apply_rotary_emb(q[..., :r], k[..., :r], freqs_cis)
    return torch.cat((heads[0], q[..., r:]), -1), torch.cat((heads[1], k[..., r:]), -1)


def today(case: Case, x: Inputs, compiled: bool) -> Iterator[Contender]:
    partial = case.heads.rotary_dim < case.heads.head_dim
    llama = rotate_llama_partial if partial else reference.apply_rotary_emb
    hf = rotate_hf_partial if partial else rotate_hf
    cos, sin = (part.repeat(1, 2).to(x.q.dtype)[None] for part in (x.freqs_cis.real, x.freqs_cis.imag))
    meta_names = {"q": x.q, "k": x.k, "t": x.freqs_cis}
    hf_names = {"q": x.q.transpose(1, 2), "k": x.k.transpose(1, 2), "c": cos, "s": sin}

    def tokens_first(value: Pair) -> Pair:
        return value[0].transpose(1, 2), value[1].transpose(1, 2)

    yield Contender("eager LLaMA", "today", "f(q, k, t)", meta_names | {"f": llama})
    names = hf_names | {"f": hf}
    yield Contender("eager HF", "today", "f(q, k, c, s)", names, pairing="halves", result=tokens_first)
    if compiled:
        torch._dynamo.reset()
        llama, hf = (torch.compile(function, fullgraph=True, dynamic=False) for function in (llama, hf))
        yield Contender("compiled LLaMA", "today", "f(q, k, t)", meta_names | {"f": llama})
        names = hf_names | {"f": hf}
        yield Contender("compiled HF", "today", "f(q, k, c, s)", names, pairing="halves", result=tokens_first)


# ---- right or left out


def same_bits(contender: Contender, x: Inputs) -> bool | None:
    """Runs a contender once. True or False for one that promises bits, None for others.

    Raises:
        LeftOut: it does not run, or what it gives is not the rotation.
    """
    if contender.result is None:
        return None
    try:
        found = contender.result(eval(contender.statement, dict(contender.names)))
    except Exception as error:
        raise LeftOut(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}") from error
    wanted = contender.wanted or (x.neighbours if contender.pairing == "neighbours" else x.halves)
    if contender.exact:
        return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for a, b in zip(found, wanted, strict=True):
        wrong = (a.float() - b.float()).abs().max() / b.float().abs().max()
        if a.shape != b.shape or not wrong <= 4 * torch.finfo(b.dtype).eps:
            raise LeftOut(f"its result is wrong by {wrong:.1e} of the largest value")
    return None
