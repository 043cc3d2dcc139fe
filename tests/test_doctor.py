"""``python -m rope_ext``: well where it is well, and for every fault its sentence, with what to type, and status 1."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext
from rope_ext import __main__ as doctor
from rope_ext import reference

PACKAGE = Path(rope_ext.__file__).parent


def run(*command: str, status: int, cwd: Path = PACKAGE.parent, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    environment = {**inherited, **environment}
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_of_this_build() -> None:
    report = json.loads(run("-m", "rope_ext", "--json", status=0))
    assert report["ok"] and not report["problems"]
    assert set(report["devices"]) == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    for result in report["devices"].values():
        assert result["self_test"] == "ok" and result["over_copy"] > 0
    info = rope_ext.build_info()
    assert report["facts"]["torch"] == report["facts"]["built_for"] == torch.__version__
    assert set(report["facts"]["build"]) == set(info) and report["facts"]["build"]["version"] == info["version"]
    machine = report["facts"]["cpu_isa_machine"]
    assert report["facts"]["build"]["cpu_isa"] == machine  # what it finds by itself is what torch found


def test_of_a_lowered_instruction_set_in_words() -> None:
    lowered = doctor.facts()["cpu_isa_machine"] != "default"
    out = run(str(PACKAGE), status=int(lowered), ATEN_CPU_CAPABILITY="default")
    assert ("WRONG: ATEN_CPU_CAPABILITY=default" in out) == lowered and ("All is well." in out) != lowered
    assert "self-test: ok" in out and torch.__version__ in out


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The package without its libraries, built for a torch that does not exist."""
    copy = tmp_path / "rope_ext"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (copy / "_built_for.py").write_text('TORCH = "1.2.3"\n')
    return copy


def test_where_the_package_cannot_be_imported(broken: Path) -> None:
    (sentence,) = json.loads(run(str(broken), "--json", status=1))["problems"]
    assert f"built for torch 1.2.3 and this is torch {torch.__version__}" in sentence
    assert "`pip install --no-build-isolation --no-deps --force-reinstall .`" in sentence  # no setup.py lies beside it
    assert "built for torch 1.2.3" in run("-m", "rope_ext", status=1, cwd=broken.parent)
    (broken / "_built_for.py").unlink()
    (sentence,) = json.loads(run(str(broken), "--json", status=1))["problems"]
    assert f"not built in {broken}" in sentence and "pip install" in sentence
    (sentence,) = json.loads(run("-S", str(broken), "--json", status=1, PYTHONPATH=""))["problems"]  # no site-packages
    assert "torch cannot be imported" in sentence and "No module named 'torch'" in sentence


WELL: dict[str, Any] = {
    "torch": "2.13.0+cu130",
    "built_for": "2.13.0+cu130",
    "torch_cuda": "13.0",
    "error": None,
    "nvcc": "/usr/local/cuda/bin/nvcc",
    "driver": True,
    "gpus": [{"name": "H100", "capability": [9, 0]}, {"name": "RTX", "capability": [8, 9]}],
    "cpu_isa_machine": "avx512",
    "ATEN_CPU_CAPABILITY": None,
    "build": {
        "version": "1",
        "torch": "2.13.0+cu130",
        "cuda": {"toolkit": "13.0", "archs": ["sm_80", "sm_90a", "sm_90", "compute_90"]},
        "cpu_isa": "avx512",
        "cpu_isa_built": ["default", "avx2", "avx512"],
    },
}


@pytest.mark.parametrize(
    ("fault", "build_fault", "says"),
    [
        ({}, {}, None),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, {}, None),
        ({"gpus": [{"name": "newer", "capability": [12, 1]}]}, {}, None),  # PTX
        ({"torch": None, "error": "OSError: libtorch"}, {}, ["torch cannot be imported (OSError: libtorch)"]),
        ({"built_for": None}, {}, ["not built", "pip install"]),
        ({"torch": "2.14.0"}, {}, ["built for torch 2.13.0+cu130 and this is torch 2.14.0", doctor.REBUILD]),
        ({"build": None, "error": "ImportError: undefined symbol: x"}, {}, ["undefined symbol: x", doctor.REBUILD]),
        ({"gpus": []}, {}, ["sees no GPU", "driver"]),
        ({"gpus": [], "torch_cuda": None}, {}, ["sees no GPU", "install a CUDA build"]),
        ({}, {"cuda": None}, ["without CUDA kernels", f"ROPE_EXT_CUDA=1 {doctor.REBUILD}"]),
        ({"nvcc": None}, {"cuda": None}, ["install CUDA 13.0 with nvcc", "CUDA_HOME", "ROPE_EXT_CUDA=1"]),
        ({}, {"cuda": {"toolkit": "13.0", "archs": ["sm_80", "sm_90"]}}, None),
        ({"driver": False, "gpus": []}, {"cuda": None}, None),  # a CPU build where there is nothing else
        ({}, {"cpu_isa": "avx2"}, None),  # torch's own choice
        (
            {"gpus": [{"name": "B300", "capability": [10, 3]}]},
            {"cuda": {"toolkit": "13.0", "archs": ["sm_100a"]}},
            ["GPU 0, B300", "10.3"],
        ),
        (
            {"gpus": [{"name": "B200", "capability": [10, 0]}]},
            {"cuda": {"toolkit": "12.4", "archs": ["sm_80", "sm_90a", "compute_110"]}},
            ["GPU 0, B200", "10.0", "TORCH_CUDA_ARCH_LIST=10.0+PTX"],
        ),
        (
            {"gpus": [{"name": "older", "capability": [8, 0]}]},
            {"cuda": {"toolkit": "13.0", "archs": ["sm_86", "compute_90"]}},
            ["older", "TORCH_CUDA_ARCH_LIST=8.0+PTX"],
        ),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, {"cpu_isa": "avx2"}, ["at avx2", "has avx512", "unset ATEN_CPU_CAPABILITY"]),
    ],
)
def test_planted_faults(
    fault: dict[str, Any],
    build_fault: dict[str, Any],
    says: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = deepcopy(WELL) | fault
    if found["build"]:
        found["build"] |= build_fault
    monkeypatch.setattr(doctor, "facts", lambda: found)
    monkeypatch.setattr(doctor, "examine", lambda found: ({}, []))
    status = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (says is not None) and report["ok"] == (says is None)
    assert len(report["problems"]) == status
    for words in says or []:
        assert words in report["problems"][0]


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One number in one place, for one dtype: only the reference knows."""
    own = reference.rotate

    def other(x: Tensor, *rest: Any) -> Tensor:
        out = own(x, *rest)
        if x.dtype == torch.float16:
            out[1, 6, 4, -1] += 1
        return out

    monkeypatch.setattr(reference, "rotate", other)
    monkeypatch.setattr(doctor, "over_copy", lambda device: 1.0)
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "self-test fails on cpu" in report["problems"][-1]
    assert report["devices"]["cpu"]["self_test"].startswith(
        "AssertionError: rotate is not the reference, torch.float16"
    )
