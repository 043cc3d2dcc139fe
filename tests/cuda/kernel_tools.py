"""Finds what the checks of the CUDA kernels need, and says aloud what they had to leave out.

Two instruments come from the kernel tools folder: a runner of PTX (ptxrun.py) and a reader of machine code
(sasstab.py). It is named by ROPE_EXT_KERNEL_TOOLS, or lies beside the repository. With ROPE_EXT_REQUIRE_KERNEL_TOOLS=1
a check that lacks anything fails instead of being skipped.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "csrc" / "cuda" / "rotate.cu"
FLAGS = ["-std=c++17", "-O3", "--fmad=false"]  # as in setup.py


def leave_out(reason: str) -> NoReturn:
    if os.environ.get("ROPE_EXT_REQUIRE_KERNEL_TOOLS") == "1":
        pytest.fail(f"ROPE_EXT_REQUIRE_KERNEL_TOOLS=1, but {reason}")
    pytest.skip(f"NOT CHECKED: {reason}")


def nvcc() -> str:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [str(Path(home, "bin", "nvcc")) for home in homes if home] + [shutil.which("nvcc") or ""]
    found = next((path for path in candidates if os.access(path, os.X_OK)), None)
    return found or leave_out("there is no nvcc: set CUDA_HOME to the CUDA toolkit")


def run_nvcc(*arguments: str) -> None:
    done = subprocess.run([nvcc(), *FLAGS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def nvcc_release() -> str:
    """Such as "V13.0.88"."""
    return (
        subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout.split()[-2].rstrip(",")
    )


def archs() -> list[str]:
    """The architectures that setup.py builds for by default, as far as this nvcc knows them: "75", "80" ..."""
    listed = subprocess.run([nvcc(), "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    (line,) = re.findall(r"^DEFAULT_ARCHS = (.+)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    wanted = [number.replace(".", "") for number in re.findall(r"[\d.]+", line)]
    return [arch for arch in wanted if f"compute_{arch}" in listed]


def tool(name: str) -> ModuleType:
    for folder in (os.environ.get("ROPE_EXT_KERNEL_TOOLS"), ROOT.parent / "shared" / "tools"):
        if folder and Path(folder, f"{name}.py").exists():
            sys.path.insert(0, str(folder))
            return importlib.import_module(name)
    leave_out(f"{name}.py was not found: set ROPE_EXT_KERNEL_TOOLS to the kernel tools folder")
