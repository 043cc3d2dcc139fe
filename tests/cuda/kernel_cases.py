"""Calls that between them launch every kernel, with the alignments, sizes and strides that choose it.

The shared cases are laid out so that no vector fits; these are aligned on purpose, or off by one vector.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from emulation import Call
from torch import Tensor

from cases import BF16, CASES, EXPANDED_CASES, F16, F32, F64, Inputs, Layout, Table
from harness import twins

FEW, MANY = 1000, 0  # multiprocessors: a call is small beside a thousand of them, large beside none


def aligned_table(shape: tuple[int, ...], dtype: torch.dtype) -> Table:
    """Contiguous factors of any length: freqs_cis for a complex dtype, else cos and sin."""
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def inputs(
    shape: tuple[int, ...],
    k_heads: int,
    dtype: torch.dtype,
    table: torch.dtype,
    interleaved: bool,
    layout: Layout | None = None,
    k_dtype: torch.dtype | None = None,
    rotary_dim: int | None = None,
    rows: str = "index",
    conj: bool = False,
) -> Inputs:
    layout = layout or Layout("aligned", offset=0)
    batch, seqlen = shape[:2]
    pairs = (rotary_dim or shape[-1]) // 2
    positions = None
    if rows == "index":
        lead: tuple[int, ...] = (seqlen,)
    elif rows == "by-sample":
        lead = (batch, seqlen)
    else:
        lead = (13,)
        positions = torch.randint(13, (batch, seqlen), dtype=torch.int32 if rows == "int32" else torch.int64)
    xq = layout.place(shape, dtype)
    xk = layout.place((*shape[:2], k_heads, shape[-1]), k_dtype or dtype)
    return Inputs(xq, xk, aligned_table((*lead, pairs), table), positions, interleaved, rotary_dim, conj)


def in_place(given: Inputs) -> Inputs:
    xq, xk = twins((given.xq, given.xk))
    return given._replace(xq=xq, xk=xk)


def vector_calls() -> Iterator[Call]:
    """Every instance of rotate_vectors: whole heads and partial, with every kind of row, functional and in place."""
    for dtype in (F16, BF16, F32):
        for table in (torch.complex64, F32, dtype):
            for interleaved in (True, False):
                for processors in (FEW, MANY):
                    name = f"vectors-{dtype}-{table}-{'neighbours' if interleaved else 'halves'}-{processors}"
                    common = (dtype, table, interleaved)
                    yield Call(f"{name}-index", inputs((2, 3, 37, 64), 5, *common), False, multiprocessors=processors)
                    partial = inputs((2, 3, 9, 144), 2, *common, rotary_dim=64, rows="int32", conj=True)
                    yield Call(f"{name}-partial-int32-conj", partial, False, multiprocessors=processors)
                    yield Call(f"{name}-partial-in-place", in_place(partial), True, multiprocessors=processors)
                    gaps = Layout("gaps", pad={"s": 2, "h": 1, "d": 16}, offset=8)
                    ids = inputs((2, 3, 7, 160), 33, *common, gaps, rows="int64")
                    yield Call(f"{name}-gaps-int64-in-place", in_place(ids), True, multiprocessors=processors)
                    heads_first = inputs((3, 2, 6, 96), 1, *common, Layout("", "bhsd", offset=0), rows="by-sample")
                    yield Call(f"{name}-heads-first-by-sample", heads_first, multiprocessors=processors)


def any_calls() -> Iterator[Call]:
    """Every instance of rotate_any: each vector width by alignment, tables that vectors cannot read, float64."""
    for dtype in (F16, BF16, F32, F64):
        size = dtype.itemsize
        for width in (16, 8, 4, 2):
            if width < size:
                continue
            for interleaved in (True, False):
                name = f"any-{dtype}-{width}-{'neighbours' if interleaved else 'halves'}"
                layout = Layout("", offset=0 if width == 16 else width // size)
                for table in (torch.complex128, F64) if dtype == F64 else (F32, BF16, F16):
                    given = inputs((2, 3, 5, 80), 2, dtype, table, interleaved, layout, rotary_dim=48, rows="int64")
                    if not isinstance(given.table, Tensor):  # a last stride that no vector reads
                        given = given._replace(table=tuple(every_third(half) for half in given.table))
                    yield Call(f"{name}-{table}", given)
                    yield Call(f"{name}-{table}-in-place", in_place(given), True)
        for table in (torch.complex128, F64):
            yield Call(
                f"any-{dtype}-in-{table}", inputs((2, 3, 5, 24), 2, dtype, table, True, rows="by-sample", conj=True)
            )
        yield Call(f"any-{dtype}-wide", inputs((1, 2, 3, 2 * 2064), 1, dtype, torch.complex64, False))
        yield Call(f"any-{dtype}-wide-odd", inputs((1, 2, 2, 1030), 1, dtype, torch.complex64, True, rotary_dim=518))
    for dtype in (F16, F64):
        negative = inputs((2, 3, 5, 64), 2, dtype, F32, True)
        cos, sin = negative.table
        lazily = torch.complex(cos, sin).conj().imag  # a lazy neg view
        assert lazily.is_neg()
        yield Call(f"any-{dtype}-negative-cos", negative._replace(table=(lazily, sin)))
        yield Call(f"any-{dtype}-negative-sin", negative._replace(table=(cos, lazily)))


def every_third(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, -1)[..., ::3]


def launcher_calls() -> Iterator[Call]:
    """What the launcher does with q and k of two dtypes, lazy conjugates, no heads, large grids and special values."""
    yield Call("two-dtypes", inputs((2, 3, 4, 64), 2, BF16, F32, True, k_dtype=F32))
    yield Call("two-dtypes-f64", inputs((2, 3, 4, 64), 2, F64, F32, False, k_dtype=F16))
    for shape, k_heads in (((2, 3, 0, 64), 2), ((2, 3, 2, 64), 0), ((2, 3, 0, 64), 0), ((0, 3, 2, 64), 1)):
        yield Call(f"empty-{shape}-{k_heads}", inputs(shape, k_heads, BF16, F32, True))
    for dtype in (BF16, F64):
        given = inputs((2, 3, 4, 64), 2, dtype, torch.complex64, False)
        yield Call(f"lazy-conj-{dtype}", given._replace(table=given.table.conj()))
        yield Call(f"lazy-conj-conj-{dtype}", given._replace(table=given.table.conj(), conj=True))
        yield Call(f"lazy-neg-{dtype}", given._replace(table=torch._neg_view(given.table)))
        yield Call(f"lazy-neg-conj-{dtype}", given._replace(table=torch._neg_view(given.table.conj())))
    for rows in ("index", "by-sample", "int64"):
        for width, dtype in ((64, BF16), (66, F32)):
            given = inputs((5, 7, 37, width), 11, dtype, torch.complex64, False, rows=rows)
            name = f"small-grid-{rows}-{width}"
            yield Call(name, given, limits=(3, 4, 2), multiprocessors=MANY)
            yield Call(f"{name}-in-place", in_place(given), True, limits=(2, 2, 1))
    for shape, k_heads in (((1, 70001, 1, 8), 2), ((70001, 1, 1, 8), 1), ((1, 1, 70001, 8), 1), ((3, 70, 11, 66), 2)):
        yield Call(f"large-{shape}", inputs(shape, k_heads, F16, torch.complex64, True))
    for dtype in (F16, BF16, F32, F64):
        for table in (torch.complex64, torch.complex128):
            given = inputs((1, 9, 3, 64), 2, dtype, table, True)
            info = torch.finfo(dtype)
            special = torch.tensor(
                [
                    float("nan"),
                    float("inf"),
                    -float("inf"),
                    0.0,
                    -0.0,
                    info.max,
                    -info.max,
                    info.tiny,
                    info.smallest_normal / 3,
                ]
            )
            for x in (given.xq, given.xk):
                x.copy_(special[torch.randint(len(special), x.shape)])
            given.table.view(-1)[::5] = complex(1.0, 0.0)
            yield Call(f"special-{dtype}-{table}", given)


def shared_calls() -> Iterator[Call]:
    """The cases of the whole suite, functional and in place."""
    for case in CASES + EXPANDED_CASES:
        yield Call(case.name, case.make())
    for case in CASES:
        yield Call(f"{case.name}-in-place", in_place(case.make()), True)


def all_calls() -> list[Call]:
    torch.manual_seed(1234)
    return [*vector_calls(), *any_calls(), *launcher_calls(), *shared_calls()]
