"""Under the switches and modes of PyTorch: each sees one operator by its name, and none changes a bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import rope_ext
from cases import BF16, F32, F64, Inputs, place_pair, random_rows, random_table
from harness import assert_same, formula, op
from rope_ext import RotaryEmbedding

FORMS = ("apply", "apply_cos_sin", "rotate", "rotate_cos_sin", "apply_", "apply_cos_sin_", "rotate_", "rotate_cos_sin_")
each_form = pytest.mark.parametrize("form", FORMS)


each_grad = pytest.mark.parametrize("requires_grad", (False, True), ids=("", "requires-grad"))


def arguments(form: str, requires_grad: bool = False) -> list[Any]:
    """A call with what could tempt an implementation to copy: strided tensors, position ids, a lazy conjugate."""
    xs = list(place_pair("heads-first", (2, 5, 3, 16), BF16)[: 2 if "apply" in form else 1])
    if requires_grad:
        xs = [x.detach().requires_grad_() * 2 for x in xs]  # no leaves, which an in-place call would refuse
    table, positions = random_rows("ids-by-sample", (2, 5, 3, 16), 6)
    return [*xs, *((table.real, table.imag) if "cos_sin" in form else (table.conj(),)), positions, False, 12]


@contextmanager
def deterministic() -> Iterator[None]:
    """Fills uninitialised memory with NaN, too: an output that is not written everywhere shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(F64)
    try:
        yield
    finally:
        torch.set_default_dtype(F32)


SWITCHES: dict[str, Callable[[], AbstractContextManager]] = {
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "default-device": lambda: torch.device("meta"),
    "default-dtype": default_dtype,
}


@pytest.mark.parametrize("table_dtype", (torch.complex64, BF16), ids=("complex", "cos-sin-bf16"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_nothing(switch: str, dtype: torch.dtype, table_dtype: torch.dtype, device: str) -> None:
    """Neither results and their dtypes, nor gradients: of a table, too, of which several tokens use one row."""
    pair = [x.detach().requires_grad_() for x in place_pair("sliced", (2, 5, 3, 16), dtype, device)]
    table, positions = random_rows("ids-by-sample", (2, 5, 3, 16), 8, table_dtype, device)
    tables = [t.detach().requires_grad_() for t in ((table,) if isinstance(table, Tensor) else table)]
    form = op("apply" if len(tables) == 1 else "apply_cos_sin")

    def run() -> tuple[Tensor, ...]:
        outs = form(*pair, *tables, positions)
        return (*outs, *torch.autograd.grad([x.float().square().sum() for x in outs], [*pair, *tables]))

    expected = run()
    with SWITCHES[switch]():
        found = run()
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y)


@each_grad
@each_form
def test_the_profiler_shows_one_event_and_no_copy(form: str, requires_grad: bool) -> None:
    inputs = arguments(form, requires_grad)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        op(form)(*inputs)
    names = [event.name for event in profiler.events() if "::" in event.name]
    assert names.count(f"rope::{form}") == 1
    allocations = {"aten::empty_like", "aten::empty", "aten::empty_strided"}
    assert set(names) <= {f"rope::{form}"} | (set() if form.endswith("_") else allocations)


class Calls(TorchDispatchMode):
    """What reaches the end of the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """What a Python program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@each_grad
@each_form
def test_modes_see_the_operator_by_name(form: str, requires_grad: bool) -> None:
    inputs = arguments(form, requires_grad)
    with Functions() as functions:
        op(form)(*inputs)
    with Calls() as calls:
        op(form)(*inputs)
    assert functions.names == calls.names == [f"rope.{form}.default"]


def test_modes_see_what_the_python_function_calls() -> None:
    inputs = (*place_pair("dense", (2, 5, 3, 16)), random_table((5, 8)))
    with Calls() as calls:
        rope_ext.apply_rotary_emb(*inputs)
    assert calls.names == ["rope.apply.default"]


class Labelled(Tensor):
    """A subclass that keeps what it wraps, and the name of every operator it went through."""

    inner: Tensor
    trail: tuple[str, ...]

    @staticmethod
    def __new__(cls, inner: Tensor, trail: tuple[str, ...] = ()) -> Labelled:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        self.inner, self.trail = inner, trail
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trail = tuple(name for x in args if isinstance(x, cls) for name in x.trail)
        result = func(*(x.inner if isinstance(x, cls) else x for x in args), **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, lambda x: cls(x, (*trail, str(func))), result)


def test_a_tensor_subclass_sees_the_operator_by_name() -> None:
    """Through autograd, too: the gradient is the operator again."""
    x, table = place_pair("sliced", (2, 5, 3, 16))[0], random_table((5, 8))
    wrapped = Labelled(x.clone()).requires_grad_()
    out = op("rotate")(wrapped, table)
    assert isinstance(out, Labelled) and out.trail == ("rope.rotate.default",)
    assert_same(out.inner, op("rotate")(x, table))
    (grad,) = torch.autograd.grad(out, wrapped, Labelled(x))
    assert isinstance(grad, Labelled) and grad.trail == ("rope.rotate.default",)
    assert_same(grad.inner, op("rotate")(x, table, conj=True))


@pytest.mark.parametrize("place", ("cpu", "cuda"))
@each_form
def test_a_trace_holds_one_operator_and_reads_no_value(form: str, place: str) -> None:
    """What a CUDA graph needs, on fake tensors: no value on the host and nothing around the kernel, so that a replay
    reads its positions again. Fake CUDA tensors need no GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [torch.empty_like(x, device=place) if isinstance(x, Tensor) else x for x in arguments(form)]
    count = 2 if "apply" in form else 1
    tensors = [x for x in fakes if isinstance(x, Tensor)]
    options = fakes[len(tensors) :]

    def call(*tensors: Tensor) -> Any:
        return op(form)(*tensors, *options)

    with mode:
        graph = make_fx(call, tracing_mode="real")(*tensors).graph
    nodes = [node for node in graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    assert [node.target for node in nodes] == [op(form)]
    if not form.endswith("_"):
        outs = nodes[0].meta["val"]
        for out, x in zip(outs if count == 2 else (outs,), tensors, strict=False):
            assert (out.device.type, out.shape, out.stride()) == (place, x.shape, torch.empty_like(x).stride())


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(24, 6 * 16)
        self.rope = RotaryEmbedding(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, 16)).split((4, 1, 1), 2)
        q, k = self.rope(q, k, start=3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def through_a_file(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def made_on_meta(model: torch.nn.Module) -> torch.nn.Module:
    with torch.device("meta"):
        empty = Attention()
    empty.load_state_dict(model.state_dict(), assign=True)
    return empty


def made_on_meta_then_filled(model: torch.nn.Module) -> torch.nn.Module:
    with torch.device("meta"):
        empty = Attention()
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    return empty


@pytest.mark.parametrize("journey", (through_a_file, made_on_meta, made_on_meta_then_filled, copy.deepcopy))
@pytest.mark.parametrize("used_before", (False, True))
def test_a_model_that_travels_rotates_as_before(journey: Callable, used_before: bool) -> None:
    model, x = Attention(), torch.randn(2, 5, 24)
    if used_before:
        model(x)
    other = journey(model)
    del model.rope  # nothing is borrowed from the first one
    inputs = Inputs(
        *model.qkv(x).unflatten(-1, (6, 16)).split((4, 1, 1), 2)[:2], rope_ext.precompute_freqs_cis(16, 8)[3:]
    )
    for out, want in zip(other.rope(*inputs[:2], start=3), formula(*inputs), strict=True):
        assert_same(out, want)
    model.rope = RotaryEmbedding(16, 32)
    assert_same(other(x), model(x))
    assert set(other.state_dict()) == {"qkv.weight", "qkv.bias"}
