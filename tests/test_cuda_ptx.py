"""The PTX that nvcc emits for the CUDA kernels, run on the CPU: bounds, alignment, races, and the bits of the CPU
operators. The launcher is the real one; only the machine is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import emulation
import kernel_cases
from emulation import Call, Result
from kernel_tools import SOURCE, run_nvcc, tool

ARCHS = ("75", "90", "100")  # bfloat16 by hand, and two generations that differ in PTX
EVERY = 4  # of the calls: the sample differs by architecture
LARGEST = 40_000  # elements, for the sake of time


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulation.build("race", tmp_path_factory.getbasetemp())


def run_ptx(module: object, launcher: Path, folder: Path, call: Call) -> set[str]:
    """Runs one call and judges it; returns the kernels that it launched."""
    ptxrun = tool("ptxrun")
    memory = ptxrun.Memory()
    arrays = [storage.clone().numpy() for storage in call.memory.storages]
    outputs = {call.memory.index(out) for out in call.outs if call.memory.address(out)}
    access = ["r" if i not in outputs else "rw" if call.in_place else "w" for i in range(len(arrays))]
    bases = [memory.add(array, f"storage {i}", access[i]) for i, array in enumerate(arrays)]
    launches = emulation.plan(launcher, folder, call, emulation.relocated(call.params, bases))
    for launch in launches:
        report = ptxrun.launch(module.kernels[launch.kernel], launch.grid, launch.block, launch.argument, memory)
        report.check()
        assert not report.contractible, f"{launch.kernel}: ptxas may fuse {report.contractible}"
        assert not report.approximate and not report.local_bytes
    call.judge(Result("", [torch.from_numpy(array) for array in arrays], launches))
    return {launch.kernel for launch in launches}


@pytest.mark.parametrize("arch", ARCHS)
def test_ptx(arch: str, launcher: Path, tmp_path: Path) -> None:
    ptxrun = tool("ptxrun")
    run_nvcc("-ptx", f"-arch=sm_{arch}", "-lineinfo", str(SOURCE), "-o", str(tmp_path / "rotate.ptx"))
    module = ptxrun.Module.from_file(str(tmp_path / "rotate.ptx"))
    calls = [call for call in kernel_cases.all_calls() if sum(x.numel() for x in call.xs) <= LARGEST]
    launched = set()
    for call in calls[ARCHS.index(arch) % EVERY :: EVERY]:
        launched |= run_ptx(module, launcher, tmp_path, call)
    assert len(launched) > len(module.kernels) // 2


def test_a_position_outside_the_table_stops_the_kernel(launcher: Path, tmp_path: Path) -> None:
    ptxrun = tool("ptxrun")
    run_nvcc("-ptx", "-arch=sm_90", str(SOURCE), "-o", str(tmp_path / "rotate.ptx"))
    module = ptxrun.Module.from_file(str(tmp_path / "rotate.ptx"))
    for width, position in ((64, 13), (64, -1), (66, -1), (66, 13)):
        given = kernel_cases.inputs((2, 3, 4, width), 2, torch.bfloat16, torch.complex64, True, rows="int32")
        given.positions[1, 2] = position
        with pytest.raises(ptxrun.Fault) as caught:
            run_ptx(module, launcher, tmp_path, Call("outside", given))
        assert caught.value.kind == "assert"
