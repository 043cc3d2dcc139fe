"""What the compiler makes of the CPU kernels: no fused multiply-add at any level, and no more instructions than before.

Both are read from objects compiled here with the flags of setup.py. Counts belong to a compiler: under one that
benchmarks/instructions.json does not know, they are not compared.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

import rope_ext
from benchmarks import instructions
from benchmarks.instructions import LEVELS, Counts

if platform.machine() != "x86_64":
    pytest.skip(f"NOT CHECKED: instruction sets of x86-64 on {platform.machine()}", allow_module_level=True)
if missing := instructions.missing_tools():
    pytest.skip(f"NOT CHECKED: there is no {' and no '.join(missing)}", allow_module_level=True)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return instructions.compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def counts(objects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Counts:
    return instructions.count(objects, tmp_path_factory.mktemp("counts"))


@pytest.mark.parametrize("level", LEVELS)
def test_no_fused_multiply_add(level: str, objects: dict[str, Path]) -> None:
    assert any("rotate_rows" in name for name in instructions.functions(objects[level]))
    assert instructions.fused(objects[level]) == []


def test_no_fused_multiply_add_in_the_library_in_use() -> None:
    assert instructions.fused(Path(rope_ext.__file__).with_name("librope_ext.so")) == []


def test_a_fused_multiply_add_would_be_seen(tmp_path: Path) -> None:
    contracted = instructions.compile_kernel("avx2", tmp_path, "-ffp-contract=fast")
    assert any("BFloat16, true, float" in name for name in instructions.fused(contracted))


def test_no_more_instructions_than_recorded(counts: Counts) -> None:
    before = instructions.recorded().get(instructions.compiler())
    if before is None:
        pytest.skip(f"NOT CHECKED: no counts are recorded for {instructions.compiler()}")
    assert instructions.regressions(counts, before) == []


def test_both_ways_of_counting_agree(counts: Counts) -> None:
    """A token's table row and the way to its heads come on top of the loop, and are shared by 40 heads."""
    both = {kernel: row for kernel, row in counts.items() if "call" in row}
    assert len(both) == 8
    for kernel, row in both.items():
        limit = 1.6 if kernel.startswith("default") else 1.3  # four lanes at a time leave more to do beside the loop
        assert row["loop"] < row["call"] < limit * row["loop"], kernel


def test_growth_is_reported_beyond_the_tolerance() -> None:
    before = {"avx2 bf16 halves": {"loop": 10.0, "call": 11.0}}
    within = {"avx2 bf16 halves": {"loop": 10.4, "call": 11.0}}
    beyond = {"avx2 bf16 halves": {"loop": 10.0, "call": 11.6}}
    assert instructions.regressions(within, before) == []
    assert instructions.regressions(beyond, before) == ["avx2 bf16 halves: call 11.0 -> 11.6 instructions per 16 bytes"]
    assert instructions.regressions({}, before)
