"""The source of the CUDA kernels, compiled by g++ and run on the CPU: the bits of the CPU operators, every byte of
every buffer, in any order of the threads, with and without a GPU at hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import emulation
import kernel_cases
from emulation import Call, Segments

from cases import BF16, F16, F32, F64


@pytest.fixture(scope="module", params=["sanitized", "race"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulation.build(request.param, tmp_path_factory.getbasetemp())


def kernels_of(program: Path) -> set[str]:
    symbols = subprocess.run(["nm", str(program)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"_ZN4rope\d+rotate_(?:vectors|any)I\w+", symbols))


def test_all_calls_on_every_kernel(program: Path, tmp_path: Path) -> None:
    calls = kernel_cases.all_calls()
    results = emulation.run(program, tmp_path, calls)
    for call, result in zip(calls, results, strict=True):
        call.judge(result)
    launched = {launch.kernel for result in results for launch in result.launches}
    kernels = kernels_of(program)
    assert len(kernels) >= 40
    assert launched == kernels, f"never launched: {sorted(kernels - launched)}"


@pytest.mark.parametrize("call", ["rotate", "in place"])
def test_rows_more_than_2_to_31_elements_apart(program: Path, tmp_path: Path, call: str) -> None:
    if "sanitized" in program.parts:
        pytest.skip("a sanitizer touches all of the 4 GiB that the kernel does not")
    far = 2**31
    small = kernel_cases.inputs((2, 1, 1, 128), 1, BF16, torch.complex64, False)
    reference = Call(call, kernel_cases.in_place(small), call == "in place")
    params = emulation.Params.from_buffer_copy(reference.params)
    params.x[1].heads = 0
    params.x[0].in_stride[0] = params.x[0].out_stride[0] = far
    row = 128 * 2
    buffers, expected = [], []
    q_storages = {reference.memory.index(x) for x in (reference.xs[0], reference.outs[0])}
    for index, (before, after) in enumerate(zip(reference.memory.storages, reference.expected(), strict=True)):
        if index in q_storages:  # its two samples, 4 GiB apart
            before, after = before[: 2 * row], after[: 2 * row]
            parts = [(0, before[:row].numpy().tobytes()), (2 * far, before[row:].numpy().tobytes())]
            buffers.append(Segments(2 * far + row, parts))
        else:
            after = before
            buffers.append(Segments(before.numel(), [(0, before.numpy().tobytes())]))
        expected.append(after)
    (result,) = emulation.execute(program, tmp_path, [(params, buffers, reference.limits, 100)])
    assert not result.complaint
    for actual, after in zip(result.storages, expected, strict=True):
        assert torch.equal(actual, after)


@pytest.mark.parametrize("stride, kernel", [(2**31, "rotate_vectors"), (2**36, "rotate_any")])
def test_strides_beyond_32_bits_get_the_kernel_that_reads_64(
    program: Path, tmp_path: Path, stride: int, kernel: str
) -> None:
    call = Call("far", kernel_cases.inputs((2, 3, 4, 64), 2, BF16, torch.complex64, True))
    params = emulation.relocated(call.params, [1 << 40] * 10)
    for heads in params.x:
        heads.in_stride[0] = stride
    (launch,) = emulation.plan(program, tmp_path, call, params)
    assert kernel in launch.kernel


@pytest.mark.parametrize("position", [13, -1, 2**31, 2**32 + 1, -(2**32)])
@pytest.mark.parametrize("width, dtype", [(64, BF16), (66, F32)], ids=["vectors", "any"])
def test_a_position_outside_the_table_stops_the_kernel(
    program: Path, tmp_path: Path, position: int, width: int, dtype: torch.dtype
) -> None:
    given = kernel_cases.inputs((2, 3, 4, width), 2, dtype, torch.complex64, True, rows="int64")
    given.positions[1, 2] = position
    with pytest.raises(emulation.EmulationError, match="a position lies outside the table"):
        emulation.run(program, tmp_path, [Call("outside", given)])


def test_one_launch_for_q_and_k(program: Path, tmp_path: Path) -> None:
    def launches(q: torch.dtype, k: torch.dtype, k_heads: int = 2) -> int:
        given = kernel_cases.inputs((2, 3, 4, 64), k_heads, q, torch.complex64, True, k_dtype=k)
        return len(emulation.run(program, tmp_path, [Call("launches", given)])[0].launches)

    assert launches(BF16, BF16) == launches(F64, F64) == 1
    assert launches(F16, F32) == 2
    assert launches(F16, F32, k_heads=0) == 1
