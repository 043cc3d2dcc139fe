"""Wrong calls: one table of what each must raise and say, for real, meta and fake tensors and in every grad mode."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import BF16, F16, F32, F64, place_pair, random_table, short
from harness import op, snapshot

C64 = torch.complex64


@dataclass(frozen=True)
class Spec:
    """A tensor of zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    expand: int | None = None  # the dimension of stride 0

    def make(self, device: str, requires_grad: bool) -> Tensor:
        shape = [1 if dim == self.expand else size for dim, size in enumerate(self.shape)]
        with warnings.catch_warnings():  # torch calls complex32 experimental
            warnings.simplefilter("ignore")
            x = torch.zeros(shape, dtype=self.dtype, device=device)
            if requires_grad and self.dtype.is_floating_point:
                x = x.requires_grad_().clone()  # not a leaf: those are refused in place for what they are
        return x.expand(self.shape)


@dataclass(frozen=True)
class Refusal:
    """A call that is right but for what is named here: B = 2, S = 11, 3 and 5 heads, D = 8."""

    name: str
    error: type[Exception]
    says: tuple[str, ...]  # words of the message, beside the name of the operator
    xq: Spec = Spec((2, 11, 3, 8))
    xk: Spec = Spec((2, 11, 5, 8))
    table: Spec | tuple[Spec, Spec] = Spec((11, 4), C64)
    positions: Spec | None = None
    rotary_dim: int | None = None
    pair_only: bool = False  # xq alone would be right
    in_place_only: bool = False

    def forms(self) -> list[str]:
        """The operators that must refuse it: a rule about a complex table holds for cos and sin of its shape too."""
        stems = ("apply",) if self.pair_only else ("apply", "rotate")
        if isinstance(self.table, Spec):
            suffixes = ("", "_cos_sin") if self.table.dtype == C64 else ("",)
        else:
            suffixes = ("_cos_sin",)
        ends = ("_",) if self.in_place_only else ("_", "")
        return ["".join(parts) for parts in itertools.product(stems, suffixes, ends)]

    def arguments(self, form: str, device: str, requires_grad: bool) -> tuple[Any, ...]:
        xs = (self.xq, self.xk) if form.startswith("apply") else (self.xq,)
        tables = self.table if isinstance(self.table, tuple) else (self.table,)
        if "cos_sin" in form and len(tables) == 1:
            tables = (replace(tables[0], dtype=F32),) * 2
        # in place, a table that requires grad is refused for that alone
        table_grad = requires_grad and not form.endswith("_")
        tensors = [x.make(device, requires_grad) for x in xs] + [table.make(device, table_grad) for table in tables]
        positions = self.positions and self.positions.make(device, False)
        return (*tensors, positions, True, self.rotary_dim)


def x_of(dtype: torch.dtype) -> dict[str, Spec]:
    return {"xq": Spec((2, 11, 3, 8), dtype)}


def xk_of(*shape: int, dtype: torch.dtype = F32) -> dict[str, Any]:
    return {"xk": Spec(shape, dtype), "pair_only": True}


def cos_sin(cos: Spec, sin: Spec) -> dict[str, tuple[Spec, Spec]]:
    return {"table": (cos, sin)}


def by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


SLICE = "freqs_cis[start_pos : start_pos + seqlen]"
REBUILD = ("freqs_cis", "complex64", ".to(", "imaginary", "rebuild")
PACKED = {"xq": Spec((7, 3, 8)), "xk": Spec((7, 5, 8))}
D5 = {"xq": Spec((2, 11, 3, 5)), "xk": Spec((2, 11, 5, 5))}
D96 = {"xq": Spec((2, 11, 3, 96)), "xk": Spec((2, 11, 5, 96))}
IDS_TABLE = {"table": Spec((37, 4), C64)}
EMPTY = {"xq": Spec((0, 11, 3, 8)), "xk": Spec((0, 11, 5, 8))}

REFUSALS = (
    # dtypes
    *(
        Refusal(f"freqs-{short(dtype)}", TypeError, (*REBUILD, str(dtype)), table=Spec((11, 4), dtype))
        for dtype in (F32, F64, F16, BF16)
    ),
    Refusal("freqs-view-as-real", TypeError, (*REBUILD, "torch.float32"), table=Spec((11, 4, 2))),
    Refusal(
        "freqs-complex32",
        TypeError,
        ("freqs_cis", "complex64", "torch.complex32"),
        table=Spec((11, 4), torch.complex32),
    ),
    Refusal("freqs-int64", TypeError, ("freqs_cis", "complex64", "torch.int64"), table=Spec((11, 4), torch.int64)),
    *(
        Refusal(f"x-{short(dtype)}", TypeError, ("float16, bfloat16, float32 or float64", str(dtype)), **x_of(dtype))
        for dtype in (torch.int64, torch.bool, torch.uint8, C64, torch.float8_e4m3fn)
    ),
    Refusal("xk-int64", TypeError, ("xk", "torch.int64"), **xk_of(2, 11, 5, 8, dtype=torch.int64)),
    Refusal("xk-complex64", TypeError, ("xk", "torch.complex64"), **xk_of(2, 11, 5, 8, dtype=C64)),
    Refusal("cos-int64", TypeError, ("cos", "torch.int64"), **cos_sin(*[Spec((11, 4), torch.int64)] * 2)),
    Refusal("cos-complex64", TypeError, ("cos", "torch.complex64"), **cos_sin(*[Spec((11, 4), C64)] * 2)),
    Refusal("sin-int64", TypeError, ("sin", "torch.int64"), **cos_sin(Spec((11, 4)), Spec((11, 4), torch.int64))),
    Refusal(
        "cos-fp32-sin-bf16",
        TypeError,
        ("cos and sin", "torch.float32", "torch.bfloat16"),
        **cos_sin(Spec((11, 4)), Spec((11, 4), BF16)),
    ),
    *(
        Refusal(
            f"ids-{short(dtype)}",
            TypeError,
            ("positions", "int64", str(dtype)),
            positions=Spec((11,), dtype),
            **IDS_TABLE,
        )
        for dtype in (F32, torch.int16, torch.uint8, torch.bool)
    ),
    # rows of the table
    *(
        Refusal(
            f"{rows}-rows", ValueError, ("freqs_cis", str(rows), "11", SLICE, "too short"), table=Spec((rows, 4), C64)
        )
        for rows in (37, 3, 1, 0)
    ),
    Refusal("1-row-of-cos-and-sin", ValueError, ("1 row", "11", SLICE), **cos_sin(*[Spec((1, 4))] * 2)),
    Refusal("packed-9-rows", ValueError, ("9", "7"), **PACKED, table=Spec((9, 4), C64)),
    Refusal("packed-table-by-sample", ValueError, ("freqs_cis", "3"), **PACKED, table=Spec((1, 7, 4), C64)),
    Refusal("rows-by-sample-12", ValueError, ("12", "11"), table=Spec((2, 12, 4), C64)),
    Refusal("rows-of-3-samples", ValueError, ("freqs_cis", "3", "2"), table=Spec((3, 11, 4), C64)),
    Refusal("no-batch-12-rows", ValueError, ("12", "11", SLICE), **EMPTY, table=Spec((12, 4), C64)),
    # widths
    Refusal("last-dim-3", ValueError, ("freqs_cis", "8", "3"), table=Spec((11, 3), C64)),
    Refusal("last-dim-8", ValueError, ("freqs_cis", "8"), table=Spec((11, 8), C64)),
    Refusal("last-dim-1", ValueError, ("freqs_cis", "8", "1"), table=Spec((11, 1), C64)),
    *(
        Refusal(f"last-dim-{n}-of-r64", ValueError, ("64", str(n)), **D96, table=Spec((11, n), C64), rotary_dim=64)
        for n in (20, 48)
    ),
    Refusal("rotary-dim-left-out", ValueError, ("96", "32", "rotary_dim"), **D96, table=Spec((11, 32), C64)),
    Refusal("no-heads-last-dim-3", ValueError, ("8", "3"), xq=Spec((2, 11, 0, 8)), table=Spec((11, 3), C64)),
    # q and k, heads
    Refusal("tokens-differ", ValueError, ("[2, 11, 3, 8]", "[2, 12, 5, 8]"), **xk_of(2, 12, 5, 8)),
    Refusal("batches-differ", ValueError, ("[2, 11, 3, 8]", "[3, 11, 5, 8]"), **xk_of(3, 11, 5, 8)),
    Refusal("batch-of-1", ValueError, ("[2, 11, 3, 8]", "[1, 11, 5, 8]"), **xk_of(1, 11, 5, 8)),
    Refusal("head-dims-differ", ValueError, ("[2, 11, 3, 8]", "[2, 11, 5, 10]"), **xk_of(2, 11, 5, 10)),
    Refusal("ranks-differ", ValueError, ("[2, 11, 3, 8]", "[11, 5, 8]"), **xk_of(11, 5, 8)),
    Refusal("d5", ValueError, ("head_dim", "5"), **D5, table=Spec((11, 2), C64)),
    Refusal("d5-r4", ValueError, ("head_dim", "5"), **D5, table=Spec((11, 2), C64), rotary_dim=4),
    Refusal("d0", ValueError, ("head_dim", "0"), Spec((2, 11, 3, 0)), Spec((2, 11, 5, 0)), Spec((11, 0), C64)),
    *(
        Refusal(f"r{r}", ValueError, ("rotary_dim", "8", str(r)), table=Spec((11, max(r // 2, 0)), C64), rotary_dim=r)
        for r in (5, 10, 3, 0, -2)
    ),
    *(
        Refusal(f"rank-{len(s)}", ValueError, ("rank", str(len(s))), Spec(s), Spec(s))
        for s in ((), (8,), (11, 8), (2, 11, 3, 1, 8))
    ),
    Refusal("xk-rank-2", ValueError, ("xk", "2"), **xk_of(11, 8)),
    *(
        Refusal(f"table-rank-{len(s)}", ValueError, ("freqs_cis", str(len(s))), table=Spec(s, C64))
        for s in ((), (4,), (2, 11, 1, 4))
    ),
    *(
        Refusal(f"sin-{by(s)}", ValueError, ("cos and sin", "[11, 4]", str(list(s))), **cos_sin(Spec((11, 4)), Spec(s)))
        for s in ((12, 4), (11, 1), (1, 11, 4))
    ),
    # positions
    *(
        Refusal(f"ids-{by(s)}", ValueError, ("positions", str(list(s))), positions=Spec(s, torch.int64), **IDS_TABLE)
        for s in ((12,), (3,), (1,), (2, 12), (3, 11), (11, 2), (), (2, 11, 1))
    ),
    Refusal(
        "packed-ids-1-7",
        ValueError,
        ("positions", "[1, 7]"),
        **PACKED,
        **IDS_TABLE,
        positions=Spec((1, 7), torch.int64),
    ),
    Refusal("packed-ids-9", ValueError, ("positions", "[9]"), **PACKED, **IDS_TABLE, positions=Spec((9,), torch.int64)),
    Refusal(
        "ids-and-a-table-by-sample",
        ValueError,
        ("freqs_cis", "positions", "3"),
        table=Spec((2, 11, 4), C64),
        positions=Spec((11,), torch.int64),
    ),
    # memory
    *(
        Refusal(
            f"expanded-{dim}", RuntimeError, ("expand", "clone"), xq=Spec((2, 11, 3, 8), F32, dim), in_place_only=True
        )
        for dim in range(4)
    ),
    Refusal(
        "expanded-xk",
        RuntimeError,
        ("xk", "expand"),
        xk=Spec((2, 11, 5, 8), F32, 2),
        pair_only=True,
        in_place_only=True,
    ),
)


def kinds(refusal: Refusal, form: str, mode: Callable, requires_grad: bool) -> list[tuple[str, Exception]]:
    """What the call raises with real, meta and fake tensors; real inputs must be as they were."""
    raised = []
    for kind in ("real", "meta", "fake"):
        with FakeTensorMode() if kind == "fake" else nullcontext():
            arguments = refusal.arguments(form, "meta" if kind == "meta" else "cpu", requires_grad)
            tensors = [a for a in arguments if isinstance(a, Tensor)] if kind == "real" else []
            before = [(snapshot(x), x._version) for x in tensors]
            with mode(), pytest.raises(refusal.error) as error:
                op(form)(*arguments)
            raised.append((kind, error.value))
            assert all(torch.equal(snapshot(x), old) for x, (old, _) in zip(tensors, before, strict=True))
            assert all(x._version == version for x, (_, version) in zip(tensors, before, strict=True))
    return raised


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize(
    ("refusal", "form"),
    [pytest.param(refusal, form, id=f"{refusal.name}-{form}") for refusal in REFUSALS for form in refusal.forms()],
)
def test_refusals(refusal: Refusal, form: str) -> None:
    found: dict[tuple[type, str], str] = {}
    for mode_name, mode in MODES.items():
        for requires_grad in (False, True):
            for kind, error in kinds(refusal, form, mode, requires_grad):
                found[type(error), str(error)] = f"{mode_name}, {kind}, requires_grad={requires_grad}"
    assert len(found) == 1, f"what is raised depends on the road: {found}"
    ((error_type, text),) = found
    assert error_type is refusal.error
    for words in (f"rope::{form}", *refusal.says):
        words = words.replace("freqs_cis", "cos") if "cos_sin" in form else words
        assert re.search(rf"(?<!\d){re.escape(words)}(?!\d)", text), f"{words!r} is not in: {text}"


def test_inference_tensors_are_checked_too() -> None:
    with torch.inference_mode():
        x = torch.zeros(2, 11, 3, 8)
        table = torch.zeros(12, 4, dtype=C64)
        for form in ("rotate", "rotate_"):
            with pytest.raises(ValueError, match="12 rows"):
                op(form)(x, table)


def test_a_table_that_module_to_has_cast() -> None:
    module = torch.nn.Module()
    module.register_buffer("freqs_cis", torch.ones(11, 4, dtype=C64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Casting complex values to real discards the imaginary part"
        module.to(BF16)
    assert module.freqs_cis.dtype == BF16
    with pytest.raises(TypeError, match="rebuild"):
        op("rotate")(torch.zeros(2, 11, 3, 8), module.freqs_cis)


@pytest.mark.parametrize("form", ("apply", "apply_", "apply_cos_sin", "apply_cos_sin_"))
def test_tensors_on_two_devices(form: str) -> None:
    pair = place_pair("sliced", (2, 5, 3, 8))
    positions = torch.arange(5)
    table = random_table((11, 4))
    arguments = [*pair, *((table.real, table.imag) if "cos_sin" in form else (table,)), positions]
    for i in range(len(arguments)):
        moved = [a.to("meta") if i == j else a for j, a in enumerate(arguments)]
        before = [snapshot(x) for x in pair]
        with pytest.raises(RuntimeError) as error:
            op(form)(*moved)
        for words in (f"rope::{form}", "meta", "cpu"):
            assert words in str(error.value)
        assert all(torch.equal(snapshot(x), old) for x, old in zip(pair, before, strict=True))
    op(form)(*arguments)
