"""The emulation must see what it is there to see: each of these bugs, planted in a copy of the kernels, is caught."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import emulation
import kernel_cases
from emulation import Call

from cases import BF16, F32, Layout


@dataclass(frozen=True)
class Bug:
    name: str
    kind: str  # of emulation
    file: str
    right: str
    wrong: str  # where PLANTED is true
    symptom: str  # what the emulation says


BUGS = (
    Bug(
        "misaligned-access",
        "sanitized",
        "rotate.cu",
        "aligned(x.in, bytes)",
        "(PLANTED || aligned(x.in, bytes))",
        "misaligned address",
    ),
    Bug(
        "table-row-past-the-end",
        "sanitized",
        "rotate.cuh",
        "static_cast<Index>(row)",
        "static_cast<Index>(row + PLANTED)",
        "heap-buffer-overflow",
    ),
    Bug(
        "swapped-partner",
        "race",
        "rotate.cuh",
        "store<16>(out + partner, words[u][1])",
        "store<16>(out + partner, words[u][PLANTED ? 0 : 1])",
        r"output\) has wrong bytes",
    ),
    Bug("missing-tail", "race", "rotate.cu", "in_place ? 0", "in_place || PLANTED ? 0", r"output\) has wrong bytes"),
    Bug(
        "wrong-stride",
        "race",
        "rotate.cu",
        "stride[1], p.seqlen, size",
        "stride[PLANTED ? 2 : 1], p.seqlen, size",
        r"output\) has wrong bytes|wrote",
    ),
    Bug(
        "two-writers",  # of the same value: right in any order
        "race",
        "rotate.cuh",
        "const int64_t head = group * blockDim.y + threadIdx.y;",
        "const int64_t own = group * blockDim.y + threadIdx.y, head = PLANTED && own >= x.heads ? x.heads - 1 : own;",
        "writes byte .* which thread .* (wrote|read)",
    ),
    Bug(
        "partner-of-another-lane",  # which may have written it already
        "race",
        "rotate.cuh",
        "load<16>(in + partner)",
        "load<16>(in + partner - (PLANTED ? 16 * (lane % 2) : 0))",
        "(reads|writes) byte .* which thread .* (read|wrote)",
    ),
)


def calls() -> list[Call]:
    """Few, but every bug shows in one of them."""
    torch.manual_seed(1234)
    gaps = Layout("", pad={"s": 2, "h": 1, "d": 16}, offset=8)
    whole = kernel_cases.inputs((2, 3, 4, 64), 2, BF16, torch.complex64, False, gaps)
    shifted = kernel_cases.inputs((2, 3, 4, 64), 2, BF16, torch.complex64, False, Layout("", offset=4))
    partial = kernel_cases.inputs((2, 3, 4, 128), 2, BF16, torch.complex64, True, rotary_dim=64)
    odd = kernel_cases.inputs((2, 3, 5, 66), 3, F32, torch.complex64, True)
    return [
        Call("in place", kernel_cases.in_place(partial), True),
        Call("gaps", whole),
        Call("shifted by half a vector", shifted),
        Call("partial", partial),
        Call("odd", odd),
    ]


def plant(folder: Path) -> Path:
    """A copy of the sources that holds every bug, asleep unless the environment variable PLANTED gives its number."""
    csrc = shutil.copytree(emulation.CSRC, folder / "csrc")
    for number, bug in enumerate(BUGS, 1):
        source = csrc / "cuda" / bug.file
        text = source.read_text()
        assert text.count(bug.right) == 1, f"{bug.name}: the line to spoil has changed"
        source.write_text(text.replace(bug.right, bug.wrong.replace("PLANTED", f"(planted == {number})")))
    kernels = csrc / "cuda" / "rotate.cuh"
    switch = '#include <cstdlib>\ninline const int planted = std::atoi(std::getenv("PLANTED"));\n'
    kernels.write_text(kernels.read_text().replace("#include <cassert>\n", "#include <cassert>\n" + switch, 1))
    return csrc


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("planted")
    csrc = plant(folder)
    return {kind: emulation.build(kind, folder, csrc) for kind in ("sanitized", "race")}


def run(program: Path, folder: Path, planted: int) -> None:
    here = calls()
    for call, result in zip(here, emulation.run(program, folder, here, {"PLANTED": str(planted)}), strict=True):
        call.judge(result)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Bug, programs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=bug.symptom):
        run(programs[bug.kind], tmp_path, BUGS.index(bug) + 1)


@pytest.mark.parametrize("kind", ["sanitized", "race"])
def test_without_a_bug_nothing_is_caught(kind: str, programs: dict[str, Path], tmp_path: Path) -> None:
    run(programs[kind], tmp_path, 0)
