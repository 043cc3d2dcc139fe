"""The inputs of the suite, as data: dtypes, head dims, memory layouts, row forms and the named cases made of them.

No shape is square (B = H or S = D would hide a swapped stride), sizes are not only multiples of a vector (that would
hide the tail), and no layout is the lucky one: every tensor is a view of a larger buffer full of random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rope_ext import reference

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F32, F16, BF16, F64)
HEAD_DIMS = (2, 4, 6, 8, 10, 16, 24, 40, 46, 48, 62, 64, 66, 72, 80, 96)
HEAD_DIMS += (112, 120, 128, 160, 192, 256, 320, 512, 576, 1030)
META_DIMS = (64, 80, 96, 128, 160, 192, 256, 576)  # where Meta's own code runs vectorised on every ISA level


def short(dtype: torch.dtype) -> str:
    return {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64"}.get(dtype, str(dtype).removeprefix("torch."))


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)
each_pairing = pytest.mark.parametrize("interleaved", (True, False), ids=("neighbours", "halves"))


@dataclass(frozen=True)
class Layout:
    """How a (B, S, H, D) or packed (S, H, D) tensor lies in its buffer; all figures are in elements."""

    name: str
    order: str = "bshd"  # from the slowest dimension to the fastest
    pad: Mapping[str, int] = field(default_factory=dict)  # unused elements after a dimension
    step: int = 1  # stride of the fastest dimension
    offset: int = 3
    expand: str = ""  # dimensions of stride 0

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """A random tensor of this layout, inside a buffer of random numbers that reach beyond it on both sides."""
        sizes = dict(zip("bshd"[-len(shape) :], shape, strict=True))
        strides, extent = {}, self.step
        for dim in reversed([d for d in self.order if d in sizes]):
            strides[dim] = 0 if dim in self.expand else extent
            extent *= 1 if dim in self.expand else max(sizes[dim] + self.pad.get(dim, 0), 1)
        buffer = torch.randn(self.offset + extent + 7, device=device).to(dtype)
        return buffer.as_strided(shape, [strides[dim] for dim in sizes], self.offset)


DISJOINT_LAYOUTS = (
    Layout("dense"),
    Layout("dense-at-1", offset=1),
    Layout("dense-at-5", offset=5),
    Layout("sliced", pad={"d": 29}),  # x[..., a:b] of a wider head
    Layout("head-range", pad={"h": 4}),  # q or k inside a fused qkv buffer
    Layout("gaps", pad={"s": 2, "h": 1}),
    Layout("heads-first", order="bhsd"),
    Layout("tokens-first", order="sbhd", pad={"d": 6}),
    Layout("stepped", step=2),
    Layout("features-first", order="dbsh"),
)
EXPANDED_LAYOUTS = (
    Layout("one-head", expand="h"),
    Layout("one-sample", expand="b"),
    Layout("one-token", expand="s"),
    Layout("one-feature", expand="d"),
    Layout("one-number", expand="bshd"),
)
LAYOUTS = {layout.name: layout for layout in DISJOINT_LAYOUTS + EXPANDED_LAYOUTS}


def place_pair(
    layout: str, q_shape: tuple[int, ...], dtype: torch.dtype = F32, device: str = "cpu", k_heads: int = 2
) -> tuple[Tensor, Tensor]:
    """xq and xk of one layout, in buffers of their own."""
    k_shape = (*q_shape[:-2], k_heads, q_shape[-1])
    return LAYOUTS[layout].place(q_shape, dtype, device), LAYOUTS[layout].place(k_shape, dtype, device)


Table = Tensor | tuple[Tensor, Tensor]  # freqs_cis, or cos and sin


def random_table(shape: tuple[int, ...], dtype: torch.dtype = torch.complex64, device: str = "cpu") -> Table:
    """Factors of any length (they find renormalising and mixed-up rows) as a slice of a wider buffer.

    A complex dtype gives freqs_cis, a real one cos and sin, whose strides differ.
    """

    def piece(start: int, spare: int) -> Tensor:
        wide = torch.randn(*shape[:-1], shape[-1] + spare, device=device, dtype=F64 if dtype == F64 else F32)
        wide = torch.complex(wide, wide.roll(3, -1)) if dtype.is_complex else wide
        return wide.to(dtype)[..., start : start + shape[-1]]

    return piece(2, 5) if dtype.is_complex else (piece(4, 5), piece(1, 2))


def unit_table(head_dim: int, start: int, rows: int) -> Tensor:
    """Rows start .. start + rows of LLaMA's table, theta 1e4."""
    return reference.precompute_freqs_cis(head_dim, start + rows)[start:]


# Which table row a token uses; a packed batch knows only "rows" and "ids".
ROW_FORMS = ("rows", "rows-shared", "rows-by-sample", "ids", "ids-shared", "ids-by-sample")
PACKED_ROW_FORMS = ("rows", "ids")
ROWS = 11  # of a table that is read by position ids


def random_rows(
    form: str, shape: tuple[int, ...], pairs: int, dtype: torch.dtype = torch.complex64, device: str = "cpu"
) -> tuple[Table, Tensor | None]:
    """The table and the positions of one row form for an x of the given shape; the ids are strided, with repeats."""
    batch, seqlen = (1, shape[0]) if len(shape) == 3 else shape[:2]
    lead = {"shared": (1, seqlen), "sample": (batch, seqlen)}.get(form.split("-")[-1], (seqlen,))
    if not form.startswith("ids"):
        return random_table((*lead, pairs), dtype, device), None
    ids = torch.randint(ROWS, (*lead, 2), device=device)[..., 1]
    return random_table((ROWS, pairs), dtype, device), ids.int() if seqlen % 2 else ids


class Inputs(NamedTuple):
    """The arguments of one call; `table` is freqs_cis or (cos, sin)."""

    xq: Tensor
    xk: Tensor
    table: Table
    positions: Tensor | None = None
    interleaved: bool = True
    rotary_dim: int | None = None
    conj: bool = False


@dataclass(frozen=True)
class Case:
    name: str
    q: tuple[int, ...]
    k_heads: int
    dtype: torch.dtype = F32
    layout: str = "dense"
    rows: str = "rows"
    interleaved: bool = True
    rotary_dim: int | None = None
    conj: bool = False
    table: torch.dtype = torch.complex64
    remark: str = ""

    def make(self, device: str = "cpu") -> Inputs:
        pairs = (self.q[-1] if self.rotary_dim is None else self.rotary_dim) // 2
        table, positions = random_rows(self.rows, self.q, pairs, self.table, device)
        xq, xk = place_pair(self.layout, self.q, self.dtype, device, self.k_heads)
        return Inputs(xq, xk, table, positions, self.interleaved, self.rotary_dim, self.conj)


CASES = (
    Case("decode-b4-gqa-bf16-sliced", (4, 1, 8, 128), 2, BF16, "sliced"),
    Case("decode-b3-gqa-fp16-by-sample", (3, 1, 6, 64), 2, F16, rows="rows-by-sample"),
    Case("decode-b2-ids-by-sample", (2, 1, 5, 80), 1, BF16, "heads-first", "ids-by-sample"),
    Case("prefill-b1-mqa", (1, 37, 6, 64), 1),
    Case("prefill-b2-bf16-head-range-halves", (2, 19, 7, 80), 3, BF16, "head-range", interleaved=False),
    Case("prefill-heads-first-fp16", (2, 9, 3, 96), 1, F16, "heads-first"),
    Case("prefill-tokens-first-conj", (3, 5, 2, 66), 4, F32, "tokens-first", conj=True, remark="k has more heads"),
    Case("partial-halves-r24-of-d40", (2, 7, 3, 40), 2, F32, "sliced", interleaved=False, rotary_dim=24),
    Case("partial-r2-of-d10-fp64", (2, 3, 5, 10), 1, F64, "gaps", rotary_dim=2, remark="one pair"),
    Case("fp64-complex128", (2, 3, 4, 24), 1, F64, "dense-at-1", table=torch.complex128),
    Case("bf16-complex128", (2, 3, 4, 24), 1, BF16, table=torch.complex128, remark="float64 inside, 16 bits outside"),
    Case("cos-sin-bf16", (2, 5, 3, 48), 1, BF16, "head-range", interleaved=False, table=BF16),
    Case("cos-sin-fp32-ids-shared", (3, 4, 2, 46), 1, F16, "gaps", "ids-shared", False, 34, table=F32),
    Case("packed-t7", (7, 5, 96), 1, F32, "sliced"),
    Case("packed-t7-ids-bf16-conj", (7, 3, 72), 2, BF16, "heads-first", "ids", False, conj=True),
    Case("ids-shared-rows", (2, 6, 3, 16), 1, F32, "dense-at-5", "ids"),
    Case("rows-shared", (3, 4, 2, 24), 1, F16, rows="rows-shared", conj=True),
    Case("stepped-halves", (2, 5, 3, 16), 2, F32, "stepped", interleaved=False),
    Case("features-first", (2, 3, 5, 8), 1, BF16, "features-first"),
    Case("smallest", (1, 1, 1, 2), 1, F16, "dense-at-1"),
    Case("no-batch", (0, 4, 2, 8), 1),
    Case("no-tokens", (2, 0, 3, 8), 1, BF16),
    Case("no-heads", (2, 4, 0, 8), 1, F16, "head-range", remark="k is rotated all the same"),
    Case("nothing", (0, 0, 0, 8), 0),
    Case("packed-nothing-ids", (0, 2, 8), 1, rows="ids"),
    Case("no-batch-ids-by-sample", (0, 3, 2, 8), 1, rows="ids-by-sample"),
)
# Inputs whose elements share memory: functional calls only, in place they are refused.
EXPANDED_CASES = (
    Case("one-head", (2, 3, 5, 24), 1, F32, "one-head"),
    Case("one-sample-halves", (3, 2, 4, 48), 2, BF16, "one-sample", interleaved=False),
    Case("one-number", (2, 3, 4, 10), 1, F16, "one-number", "ids-by-sample"),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_case_or_expanded = pytest.mark.parametrize("case", CASES + EXPANDED_CASES, ids=lambda case: case.name)
