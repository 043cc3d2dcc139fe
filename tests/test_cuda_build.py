"""A build with CUDA kernels on a machine without a GPU: it imports, traces and refuses like any other, and says what is
missing when it is called for real."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import rope_ext
from cases import BF16, F16, F32
from harness import assert_same
from rope_ext import reference

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

from kernel_tools import leave_out

OPS = ("apply", "apply_cos_sin", "rotate", "rotate_cos_sin", "apply_", "apply_cos_sin_", "rotate_", "rotate_cos_sin_")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def _cuda_build() -> None:
    if rope_ext.build_info()["cuda"] is None:
        leave_out("rope_ext was built without CUDA kernels")


def test_the_build_names_its_architectures() -> None:
    cuda = rope_ext.build_info()["cuda"]
    assert cuda["toolkit"] == torch.version.cuda
    assert cuda["archs"] and all(re.fullmatch(r"(sm|compute)_\d+", arch) for arch in cuda["archs"])


@pytest.mark.parametrize("name", OPS)
def test_cuda_tensors_reach_a_kernel_of_their_own(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rope::{name}", "CUDA")


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_fake_cuda_tensors_give_what_empty_like_gives(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 5, 12, 64, dtype=dtype, device="cuda")[:, :, :8].transpose(0, 1)
        k = torch.empty(5, 2, 3, 64, dtype=F32, device="cuda")
        table = torch.empty(2, 32, dtype=torch.complex64, device="cuda")
        for x, out in zip((q, k), torch.ops.rope.apply(q, k, table), strict=True):
            like = torch.empty_like(x)
            assert (out.device, out.dtype, out.shape, out.stride()) == (x.device, x.dtype, x.shape, like.stride())
        assert torch.ops.rope.apply_(q, k, table) is None


def test_make_fx_keeps_the_operator() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 5, heads, 64, dtype=BF16, device="cuda") for heads in (8, 2))
        table = torch.empty(5, 32, dtype=torch.complex64, device="cuda")
        graph = make_fx(lambda *args: torch.ops.rope.apply(*args))(q, k, table)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.rope.apply.default in targets


def test_fake_cuda_tensors_are_refused_like_any_other() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 5, heads, 64, device="cuda") for heads in (8, 2))
        table = torch.empty(5, 32, dtype=torch.complex64, device="cuda")
        with pytest.raises(TypeError, match=r"freqs_cis.*complex"):
            torch.ops.rope.apply(q, k, table.real)
        with pytest.raises(ValueError, match=r"freqs_cis\[start_pos"):
            torch.ops.rope.apply(q, k, table[:4])
        with pytest.raises(RuntimeError, match=r"(?s)cuda.*cpu|cpu.*cuda"):
            torch.ops.rope.apply(q, k, torch.empty(5, 32, dtype=torch.complex64))
        with pytest.raises(RuntimeError, match="memory"):
            torch.ops.rope.apply_(q, q, table)


@no_gpu
def test_without_a_driver_the_error_says_so() -> None:
    q, table = torch.randn(2, 5, 8, 64), torch.randn(5, 32, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="NVIDIA driver"):
        torch.ops.rope.rotate(q.to("cuda"), table.to("cuda"))


def test_cpu_tensors_are_rotated_as_ever() -> None:
    q, table = torch.randn(2, 5, 8, 64).to(BF16), torch.randn(5, 32, dtype=torch.complex64)
    assert_same(torch.ops.rope.rotate(q, table), reference.rotate(q, table))
