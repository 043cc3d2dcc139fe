"""The Python side: a drop-in for Meta's names, build facts, pickling, and what an import says when it cannot work."""

from __future__ import annotations

import copy
import importlib.resources
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rope_ext
from cases import BF16, F32, each_dtype, place_pair, unit_table
from harness import assert_same
from rope_ext import reference


def test_build_info() -> None:
    info = rope_ext.build_info()
    assert set(info) == {"version", "torch", "cuda", "cpu_isa", "cpu_isa_built", "library"}
    assert info["version"] == rope_ext.__version__
    assert info["torch"] == torch.__version__
    assert info["cpu_isa"] in info["cpu_isa_built"]
    assert info["cpu_isa_built"][0] == "default"
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert info["cpu_isa_built"] == ["default", "avx2", "avx512"]
    assert info["cuda"] is None or (set(info["cuda"]) == {"toolkit", "archs"} and info["cuda"]["archs"])


def test_public_names_are_documented_and_typed() -> None:
    assert {"apply_rotary_emb", "build_info", "precompute_freqs_cis", "reshape_for_broadcast"} <= set(rope_ext.__all__)
    for name in rope_ext.__all__:
        public = getattr(rope_ext, name)
        assert public.__doc__
        assert inspect.isclass(public) or "return" in public.__annotations__
    assert importlib.resources.files("rope_ext").joinpath("py.typed").is_file()


def test_apply_rotary_emb_is_the_operator_to_every_tool() -> None:
    """It reaches the operator without torch.ops: modes, transforms, subclasses and fake tensors must not notice."""
    (xq, xk), table = place_pair("sliced", (2, 7, 3, 16)), unit_table(16, 3, 7)
    expected = reference.apply(xq, xk, table)

    class Seen(Tensor):
        calls: ClassVar[list] = []

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            cls.calls.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    class FunctionMode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            Seen.calls.append(function)
            return function(*args, **(kwargs or {}))

    class DispatchMode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            Seen.calls.append(function)
            return function(*args, **(kwargs or {}))

    def call_and_look(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        Seen.calls.clear()
        out = rope_ext.apply_rotary_emb(*arguments)
        assert torch.ops.rope.apply.default in Seen.calls
        return out

    results = [call_and_look(xq.as_subclass(Seen), xk, table)]
    for mode in (FunctionMode(), DispatchMode()):
        with mode:
            results.append(call_and_look(xq, xk, table))
    results.append(rope_ext.apply_rotary_emb(torch.nn.Parameter(xq), xk, table))
    results.append(rope_ext.apply_rotary_emb(xq, xk, table.conj().resolve_conj().conj()))
    results.append(torch.compile(rope_ext.apply_rotary_emb, fullgraph=True, backend="aot_eager")(xq, xk, table))
    results.append(torch.func.vmap(lambda q: rope_ext.apply_rotary_emb(q, xk, table))(xq[None]))
    with torch.inference_mode():
        results.append(rope_ext.apply_rotary_emb(xq, xk, table))
    for q, _ in results:
        assert_same(q.detach().as_subclass(Tensor).reshape(xq.shape), expected[0])
    assert results[3][0].grad_fn is not None
    with FakeTensorMode() as mode:
        fakes = rope_ext.apply_rotary_emb(*map(mode.from_tensor, (xq, xk, table)))
    assert all(isinstance(fake, FakeTensor) and fake.shape == x.shape for fake, x in zip(fakes, (xq, xk), strict=True))


def test_apply_rotary_emb_of_what_is_no_tensor() -> None:
    x, table = torch.zeros(1, 3, 2, 8), unit_table(8, 0, 3)
    for wrong in ((x, None, table), (x, x, [1j]), (3, x, table)):
        with pytest.raises((TypeError, RuntimeError), match="rope::apply"):
            rope_ext.apply_rotary_emb(*wrong)
    with pytest.raises(TypeError):
        rope_ext.apply_rotary_emb(x, x)


@each_dtype
def test_apply_rotary_emb_is_metas(dtype: torch.dtype, device: str) -> None:
    torch.set_num_threads(1)
    xq, xk = place_pair("head-range", (2, 7, 5, 64), dtype, device)
    table = unit_table(64, 0, 50)
    out = rope_ext.apply_rotary_emb(xk=xk, xq=xq, freqs_cis=table[30:37].to(device))
    if dtype != torch.float64:  # which Meta's code computes in float32
        meta = reference.apply_rotary_emb(xq.cpu().clone(), xk.cpu().clone(), table[30:37])
        for a, b in zip(out, meta, strict=True):
            assert_same(a.cpu(), b.contiguous())
    with pytest.raises(ValueError, match=r"50 rows for a sequence of 7.*freqs_cis\[start_pos : start_pos \+ seqlen\]"):
        rope_ext.apply_rotary_emb(xq, xk, table.to(device))


def test_reshape_for_broadcast() -> None:
    table = unit_table(16, 0, 7)
    x = torch.zeros(2, 7, 3, 8, dtype=torch.complex64)
    view = rope_ext.reshape_for_broadcast(table, x)
    assert view.shape == (1, 7, 1, 8) and view.data_ptr() == table.data_ptr()
    assert_same(view, reference.reshape_for_broadcast(table, x))
    for wrong in (table[:6], table[:, :7], table[None], table[0]):
        with pytest.raises(ValueError) as error:
            rope_ext.reshape_for_broadcast(wrong, x)
        assert str(tuple(wrong.shape)) in str(error.value) and str(tuple(x.shape)) in str(error.value)


class Attention(torch.nn.Module):
    """Written as in llama/model.py, cache included; the names of the rotation come from outside."""

    def __init__(self, functions: object) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.apply_rotary_emb: Callable = functions.apply_rotary_emb
        self.wq, self.wk = (torch.nn.Linear(48, heads * 64, bias=False, dtype=BF16) for heads in (3, 1))
        self.register_buffer("freqs_cis", functions.precompute_freqs_cis(64, 32), persistent=False)
        self.register_buffer("cache_k", torch.zeros(2, 32, 1, 64, dtype=BF16))

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        batch, seqlen, _ = x.shape
        xq, xk = self.wq(x).view(batch, seqlen, 3, 64), self.wk(x).view(batch, seqlen, 1, 64)
        xq, xk = self.apply_rotary_emb(xq, xk, freqs_cis=self.freqs_cis[start_pos : start_pos + seqlen])
        self.cache_k[:batch, start_pos : start_pos + seqlen] = xk
        keys = self.cache_k[:batch, : start_pos + seqlen].transpose(1, 2)
        return (xq.transpose(1, 2) @ keys.transpose(2, 3)).float().softmax(-1)


def test_dropping_it_into_metas_model() -> None:
    torch.set_num_threads(1)
    mine, theirs = Attention(rope_ext), Attention(reference)
    with torch.inference_mode():
        for start_pos, seqlen in ((0, 9), (9, 1), (10, 1), (11, 4)):
            x = torch.randn(2, seqlen, 48).to(BF16)
            assert_same(mine(x, start_pos), theirs(x, start_pos))


def test_a_module_that_calls_the_op_is_copied_and_saved() -> None:
    module = Attention(rope_ext)
    x = torch.randn(2, 5, 48).to(BF16)
    with torch.no_grad():
        expected = module(x, 3)
    copied = copy.deepcopy(module)
    loaded = Attention(rope_ext)
    torch.nn.init.zeros_(loaded.wq.weight)
    loaded.load_state_dict(module.state_dict())
    for other in (copied, loaded, pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            assert_same(other(x, 3), expected)


def test_functions_pickle() -> None:
    for name in rope_ext.__all__:
        function = getattr(rope_ext, name)
        assert pickle.loads(pickle.dumps(function)) is function
    x = torch.randn(1, 3, 2, 8, dtype=F32)
    (out,) = pickle.loads(pickle.dumps((torch.ops.rope.rotate(x, unit_table(8, 0, 3)),)))
    assert_same(out, reference.rotate(x, unit_table(8, 0, 3)))


@pytest.mark.parametrize(
    ("built_for", "says"),
    (
        ("types.SimpleNamespace(TORCH='1.2.3')", ("built for torch 1.2.3", torch.__version__, "pip install")),
        ("None", ("not built", "pip install")),
    ),
)
def test_an_import_that_cannot_work_says_what_to_run(built_for: str, says: tuple[str, ...]) -> None:
    code = f"import sys, types; sys.modules['rope_ext._built_for'] = {built_for}; import rope_ext"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode and last.startswith("ImportError: ") and "undefined symbol" not in last
    assert all(words in last for words in says)
