"""How the suite judges a call: every operator, functional and in place, bit for bit, with the memory around it.

One function, `check`, runs all the operators that an input fits. A test only says which input is worth the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import rope_ext
from cases import Table
from rope_ext import reference

assert rope_ext.__file__  # importing it registers torch.ops.rope
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.rope, name).default


def same_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Per element; NaN equals NaN whatever its payload, -0.0 and 0.0 differ."""
    bits = BITS[expected.element_size()]
    return (actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())


def assert_same(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device), what
    if expected.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected.resolve_conj())
    wrong = (~same_bits(actual, expected)).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        values = f"{actual[first].item()!r}, should be {expected[first].item()!r}"
        pytest.fail(f"{what}: {len(wrong)} of {actual.numel()} numbers differ, the first at {first}: {values}")


def whole_storage(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(0, dtype=dtype or x.dtype, device=x.device).set_(x.untyped_storage())


def snapshot(x: Tensor) -> Tensor:
    return whole_storage(x, torch.uint8).clone()


def addresses(x: Tensor) -> Tensor:
    """The storage offset, in elements, of every element."""
    result = torch.full(x.shape, x.storage_offset())
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = torch.arange(size) * stride if size > 1 else torch.zeros(size, dtype=torch.int64)
        result += steps.view([-1 if d == dim else 1 for d in range(x.ndim)])
    return result.flatten()


def twins(xs: Sequence[Tensor]) -> list[Tensor]:
    """The same views of copies of the same buffers, guard elements included."""
    copies: dict[int, Tensor] = {}
    for x in xs:
        copies.setdefault(x.untyped_storage().data_ptr(), whole_storage(x).clone())
    return [
        copies[x.untyped_storage().data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset()) if x.numel() else x
        for x in xs
    ]


def share_memory(xs: Sequence[Tensor]) -> bool:
    """Whether two elements of the tensors, or of one of them, have one address."""
    seen: dict[int, list[Tensor]] = {}
    for x in xs:
        seen.setdefault(x.untyped_storage().data_ptr(), []).append(addresses(x))
    return any(torch.cat(found).unique().numel() < sum(map(len, found)) for found in seen.values())


def check_functional(name: str, xs: Sequence[Tensor], rest: tuple, expected: Sequence[Tensor]) -> None:
    inputs = [value for value in (*xs, *rest) if isinstance(value, Tensor)]
    before = [(snapshot(x), x._version) for x in inputs]
    outs = op(name)(*xs, *rest)
    outs = (outs,) if isinstance(outs, Tensor) else outs
    for label, x, out, want in zip(("first", "second"), xs, outs, expected, strict=False):
        assert_same(out, want, f"{name}, {label} output")
        assert out.stride() == torch.empty_like(x).stride(), f"{name}, strides of the {label} output"
    memories = [x.untyped_storage().data_ptr() for x in outs if x.numel()]
    assert len(set(memories)) == len(memories), f"{name}: outputs share memory"
    for value, (bytes_before, version) in zip(inputs, before, strict=True):
        assert torch.equal(snapshot(value), bytes_before) and value._version == version, f"{name} changed an input"
        assert value.untyped_storage().data_ptr() not in memories, f"{name}: an output is an input"


def check_in_place(
    name: str,
    xs: Sequence[Tensor],
    rest: tuple,
    expected: Sequence[Tensor],
    mode: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    xs = twins(xs)
    before = [(snapshot(x), x._version) for x in xs]
    if share_memory(xs):
        with mode(), pytest.raises(RuntimeError, match=r"share memory|several elements in one place"):
            op(name)(*xs, *rest)
        assert all(torch.equal(snapshot(x), old) for x, (old, _) in zip(xs, before, strict=True)), (
            f"{name} wrote, then refused"
        )
        return
    with mode():
        assert op(name)(*xs, *rest) is None
    for label, x, want, (_, version) in zip(("first", "second"), xs, expected, before, strict=False):
        assert_same(x, want, f"{name}, {label} tensor")
        assert x._version > version, f"{name} did not bump a version counter"
    for x, (old, _) in zip(xs, before, strict=True):
        inside = torch.cat(
            [addresses(y) for y in xs if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()]
        )
        outside = torch.ones(whole_storage(x).numel(), dtype=torch.bool).index_fill_(0, inside, False).to(x.device)
        guards = whole_storage(x, BITS[x.element_size()])[outside]
        assert torch.equal(guards, old.view(guards.dtype)[outside]), f"{name} wrote outside of its tensor"


def forms(table: Table) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """The name suffix and the table arguments of each operator family that takes this table."""
    if isinstance(table, Tensor):
        yield "", (table,)
        yield "_cos_sin", (table.real, table.imag)
    else:
        yield "_cos_sin", table


def formula(
    xq: Tensor,
    xk: Tensor,
    table: Table,
    positions: Tensor | None = None,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    conj: bool = False,
) -> tuple[Tensor, Tensor]:
    options = (positions, interleaved, rotary_dim, conj)
    if isinstance(table, Tensor):
        return reference.apply(xq, xk, table, *options)
    return reference.apply_cos_sin(xq, xk, *table, *options)


def check(
    xq: Tensor,
    xk: Tensor,
    table: Table,
    positions: Tensor | None = None,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    conj: bool = False,
) -> tuple[Tensor, Tensor]:
    """Runs every operator that fits on these inputs, compares each with the formula, returns the rotated q and k.

    Also checked: strides of outputs, inputs and their buffers unchanged, outputs in memory of their own; in place,
    nothing but the tensor's own elements written, and refusal where those share memory.
    """
    options = (positions, interleaved, rotary_dim, conj)
    expected = formula(xq, xk, table, *options)
    for suffix, tables in forms(table):
        for stem, xs, want in (
            ("apply", (xq, xk), expected),
            ("rotate", (xq,), expected[:1]),
            ("rotate", (xk,), expected[1:]),
        ):
            check_functional(stem + suffix, xs, (*tables, *options), want)
            check_in_place(f"{stem}{suffix}_", xs, (*tables, *options), want)
    return expected
