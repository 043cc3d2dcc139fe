"""What torch's tools see of the operators: schemas, meta and fake kernels, opcheck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cases import CASES, EXPANDED_CASES, Case, each_case_or_expanded, place_pair, random_table
from harness import op

OPTIONS = "Tensor? positions=None, bool interleaved=True, int? rotary_dim=None, bool conj=False"
SCHEMAS = {
    "apply": f"(Tensor xq, Tensor xk, Tensor freqs_cis, {OPTIONS}) -> (Tensor, Tensor)",
    "apply_": f"(Tensor(a!) xq, Tensor(b!) xk, Tensor freqs_cis, {OPTIONS}) -> ()",
    "apply_cos_sin": f"(Tensor xq, Tensor xk, Tensor cos, Tensor sin, {OPTIONS}) -> (Tensor, Tensor)",
    "apply_cos_sin_": f"(Tensor(a!) xq, Tensor(b!) xk, Tensor cos, Tensor sin, {OPTIONS}) -> ()",
    "rotate": f"(Tensor x, Tensor freqs_cis, {OPTIONS}) -> Tensor",
    "rotate_": f"(Tensor(a!) x, Tensor freqs_cis, {OPTIONS}) -> ()",
    "rotate_cos_sin": f"(Tensor x, Tensor cos, Tensor sin, {OPTIONS}) -> Tensor",
    "rotate_cos_sin_": f"(Tensor(a!) x, Tensor cos, Tensor sin, {OPTIONS}) -> ()",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_the_published_ones(name: str) -> None:
    assert str(op(name)._schema) == f"rope::{name}{SCHEMAS[name]}"
    assert getattr(torch.ops.rope, name).overloads() == ["default"]


def test_there_are_eight_operators() -> None:
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("rope::")}
    assert names == {f"rope::{name}" for name in SCHEMAS}


@pytest.mark.parametrize("name", [name for name in SCHEMAS if not name.endswith("_")])
def test_arguments_by_keyword_and_by_position(name: str) -> None:
    pair = dict(zip(("xq", "xk"), place_pair("sliced", (2, 5, 3, 8)), strict=True))
    xs = pair if "apply" in name else {"x": pair["xq"]}
    table = random_table((5, 4))
    tables = {"cos": table.real, "sin": table.imag} if "cos_sin" in name else {"freqs_cis": table}
    options = {"positions": None, "interleaved": False, "rotary_dim": None, "conj": True}
    packet = getattr(torch.ops.rope, name)
    by_position = packet(*xs.values(), *tables.values(), *options.values())
    for result in (
        packet(**options, **tables, **xs),
        packet(*xs.values(), *tables.values(), conj=True, interleaved=False),
    ):
        torch.testing.assert_close(result, by_position, rtol=0, atol=0)


def tensors_of(case: Case) -> tuple[str, list[Tensor], list[Tensor], tuple]:
    """The suffix of the operators, the tensors to rotate, the tables, and the options."""
    xq, xk, table, *options = case.make()
    tables = [table] if isinstance(table, Tensor) else list(table)
    return "" if len(tables) == 1 else "_cos_sin", [xq, xk], tables, tuple(options)


@each_case_or_expanded
def test_meta_and_fake_tensors_have_the_real_geometry(case: Case) -> None:
    suffix, xs, tables, (positions, *options) = tensors_of(case)
    tensors = [*xs, *tables, positions]

    def geometry(outs: tuple[Tensor, ...]) -> list[tuple]:
        """Without the strides of single elements, where torch.empty_like itself is of two minds."""
        strides = [[int(s) for n, s in zip(o.shape, o.stride(), strict=True) if n > 1 and o.numel()] for o in outs]
        return [
            (tuple(map(int, o.shape)), s, o.dtype, int(o.storage_offset())) for o, s in zip(outs, strides, strict=True)
        ]

    def to_meta(x: Tensor | None) -> Tensor | None:
        return x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    apply = op(f"apply{suffix}")
    real = geometry(apply(*tensors, *options))
    assert geometry(apply(*map(to_meta, tensors), *options)) == real
    for shape_env in (None, ShapeEnv()):
        mode = FakeTensorMode(shape_env=shape_env)
        fakes = [x if x is None else mode.from_tensor(x, static_shapes=shape_env is None) for x in tensors]
        with mode:
            outs = apply(*fakes, *options)
            assert geometry(outs) == real
            assert all(out.device.type == "cpu" for out in outs)
            assert [o.stride() for o in outs] == [torch.empty_like(x).stride() for x in fakes[:2]]
            if case not in EXPANDED_CASES:
                assert op(f"apply{suffix}_")(*fakes, *options) is None


def test_fake_tensors_never_read_positions() -> None:
    x = torch.empty(2, 5, 3, 8, device="meta")
    positions = torch.full((5,), 99, device="meta")
    assert op("rotate")(x, torch.empty(11, 4, dtype=torch.complex64, device="meta"), positions).shape == x.shape


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    suffix, xs, tables, options = tensors_of(case)
    torch.library.opcheck(op(f"apply{suffix}_"), (*xs, *tables, *options))
    leaves = [x.detach().requires_grad_() for x in xs]
    torch.library.opcheck(op(f"apply{suffix}"), (*leaves, *tables, *options))


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_opcheck_of_one_tensor_and_of_table_gradients(case: Case) -> None:
    suffix, (x, _), tables, options = tensors_of(case)
    torch.library.opcheck(op(f"rotate{suffix}_"), (x, *tables, *options))
    torch.library.opcheck(op(f"rotate{suffix}"), (x, *tables, *options))
    leaves = [t.detach().requires_grad_() for t in (x, *tables)]
    torch.library.opcheck(op(f"rotate{suffix}"), (*leaves, *options))


@pytest.mark.parametrize("case", EXPANDED_CASES, ids=lambda case: case.name)
def test_opcheck_of_expanded_inputs(case: Case) -> None:
    suffix, xs, tables, options = tensors_of(case)
    torch.library.opcheck(op(f"apply{suffix}"), (*xs, *tables, *options))
