"""What nvcc makes of the CUDA kernels: they compile for every architecture without spills, and their machine code stays
as good as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import sass
from kernel_tools import SOURCE, archs, leave_out, nvcc_release, run_nvcc

TOLERANCE = 1.05
# instructions per 16 bytes in large calls: a third of what an H200 can issue at its full memory speed
ENOUGH = {"f16": 31, "bf16": 31, "f32": 18}


def test_every_default_architecture_compiles_without_spills_or_local_memory(tmp_path: Path) -> None:
    targets = archs()
    assert len(targets) >= 5
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in targets]
    codes.append(f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}")
    strict = ["-Xptxas", "-warn-spills,-warn-lmem-usage,-Werror", "-Werror", "all-warnings", "-t", "2"]
    run_nvcc("-c", *codes, *strict, str(SOURCE), "-o", str(tmp_path / "rotate.o"))
    assert (tmp_path / "rotate.o").stat().st_size > 0


def is_main(kernel: str) -> bool:
    """Nearly all calls: a complex64 table, 16-byte vectors."""
    return kernel.startswith("rotate_vectors") and "complex_f32" in kernel


@pytest.mark.parametrize("arch", sass.ARCHS)
def test_machine_code(arch: str) -> None:
    found = sass.figures(arch)
    for kernel, row in found.items():
        for key in sass.FORBIDDEN:
            assert not row.get(key), f"{kernel}: {key} is {row[key]}"
        if kernel.startswith("rotate_vectors"):
            assert row["narrow_stores"] == 0, f"{kernel} stores less than 16 bytes at a time"
        if is_main(kernel):
            assert row["narrow_loads"] == 2, f"{kernel}: only a position, of either type, is narrower than 16 bytes"

    baseline = json.loads(sass.BASELINE.read_text())
    if baseline["nvcc"] != nvcc_release():
        leave_out(f"the baseline was made with nvcc {baseline['nvcc']}, this is {nvcc_release()}")
    assert tuple(baseline["figures"]) == sass.FIGURES
    assert found.keys() == baseline[f"sm_{arch}"].keys()
    for kernel, row in found.items():
        before = dict(zip(sass.FIGURES, baseline[f"sm_{arch}"][kernel], strict=True))
        for key in ("registers", "instructions", "per_16_bytes", "narrow_loads", "narrow_stores"):
            assert row[key] <= before[key] * TOLERANCE, f"{kernel}: {key} {before[key]} -> {row[key]}"
        _, dtype, *_, heads = kernel.split()
        if is_main(kernel) and heads == "4":
            assert row["per_16_bytes"] <= ENOUGH[dtype], f"{kernel}: {row['per_16_bytes']} instructions per 16 bytes"
