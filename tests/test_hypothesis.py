"""Random calls: right ones equal the formula, in any layout; all others are refused, by real and meta kernels alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import DTYPES, F32, PACKED_ROW_FORMS, ROW_FORMS, Inputs, Layout, random_rows
from harness import check, formula, op

small = st.integers(0, 4)
pads = st.fixed_dictionaries({}, optional={dim: st.integers(1, 9) for dim in "bshd"})
expansions = st.one_of(st.just(""), st.just(""), st.sampled_from("bshd"), st.just("bh"))
layouts = st.builds(
    Layout,
    st.just("random"),
    st.permutations("bshd").map("".join),
    pads,
    st.sampled_from((1, 1, 1, 2, 3)),
    st.integers(0, 9),
    expansions,
)
table_dtypes = st.sampled_from((torch.complex64, torch.complex64, torch.complex128, *DTYPES))


@st.composite
def right_calls(draw: st.DrawFn) -> Inputs:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    pairs, rest = draw(st.integers(1, 40)), draw(st.sampled_from((0, 0, 2, 6, 32)))
    lead = draw(st.one_of(st.tuples(small), st.tuples(small, small)))
    shapes = [(*lead, draw(small), 2 * pairs + rest) for _ in range(2)]
    xs = [draw(layouts).place(shape, draw(st.sampled_from(DTYPES))) for shape in shapes]
    form = draw(st.sampled_from(PACKED_ROW_FORMS if len(lead) == 1 else ROW_FORMS))
    table, positions = random_rows(form, shapes[0], pairs, draw(table_dtypes))
    rotary_dim = 2 * pairs if rest else draw(st.sampled_from((None, 2 * pairs)))
    return Inputs(*xs, table, positions, draw(st.booleans()), rotary_dim, draw(st.booleans()))


@given(right_calls())
def test_right_calls(inputs: Inputs) -> None:
    check(*inputs)


# sizes that fit one another often enough to be right now and then
sizes = st.sampled_from((0, 1, 2, 3, 4, 4, 6))
shapes = st.one_of(
    st.tuples(sizes, sizes, sizes, sizes), st.tuples(sizes, sizes, sizes), st.lists(sizes, max_size=5).map(tuple)
)


@st.composite
def any_calls(draw: st.DrawFn) -> dict[str, Any]:
    x = draw(shapes)
    fitting = [(*x[1:2], 2), (x[0], 2), (*x[:2], 2), (1, *x[1:2], 2)] if len(x) > 2 else [(4, 2)]
    ids = [x[:1], x[1:2], x[:2], (1, *x[1:2])]
    return {
        "x": x,
        "table": draw(st.one_of(st.sampled_from(fitting), st.sampled_from(fitting), shapes)),
        "positions": draw(st.one_of(st.none(), st.sampled_from(ids), st.lists(sizes, max_size=3).map(tuple))),
        "rotary_dim": draw(st.sampled_from((None, None, 4, 4, 2, 0, -2, 3, 6, 8))),
    }


def is_right(x: tuple, table: tuple, positions: tuple | None, rotary_dim: int | None) -> bool:
    """The table of argument shapes in the documentation, spelled out once more."""
    if len(x) not in (3, 4):
        return False
    *lead, _, head_dim = x
    width = head_dim if rotary_dim is None else rotary_dim
    if head_dim % 2 or width % 2 or not 0 < width <= head_dim or table[-1:] != (width // 2,):
        return False
    tokens = [(lead[-1],), *([(1, lead[1]), tuple(lead)] if len(lead) == 2 else [])]
    if positions is not None:
        return len(table) == 2 and positions in tokens
    return table[:-1] in tokens


@given(any_calls())
def test_any_call_is_right_or_refused(call: dict[str, Any]) -> None:
    def tensors(device: str) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(call["x"], generator=generator).to(device)
        table = torch.randn(call["table"], generator=generator, dtype=torch.complex64).to(device)
        rows = call["table"][0] if call["table"] else 0
        if call["positions"] is None or (rows == 0 and 0 not in call["positions"]):
            return x, table, None
        return x, table, torch.randint(max(rows, 1), call["positions"], generator=generator).to(device)

    x, table, positions = tensors("cpu")
    options = (True, call["rotary_dim"])
    if is_right(x.shape, tuple(table.shape), None if positions is None else tuple(positions.shape), call["rotary_dim"]):
        assert op("rotate")(x, table, positions, *options).equal(formula(x, x, table, positions, *options)[0])
        assert op("rotate")(*tensors("meta"), *options).shape == x.shape
        return
    texts = set()
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=r"^rope::rotate: ") as error:
            op("rotate")(*tensors(device), *options)
        texts.add(str(error.value))
    assert len(texts) == 1 and x.dtype == F32
