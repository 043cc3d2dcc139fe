"""What is shipped: symbols and needs of the libraries, contents of sdist and wheel; and what setup.py refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import rope_ext
from rope_ext import _C

ROOT = Path(__file__).parent.parent
PACKAGE = Path(rope_ext.__file__).parent
LIBRARY, MODULE = PACKAGE / "librope_ext.so", Path(_C.__file__)
OPENMP = ("libgomp", "libiomp5", "libomp")


def run(*command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    wanted = {**os.environ, **environment}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=wanted, capture_output=True, text=True)


def lines(*command: object) -> list[str]:
    result = run(*command)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def needed(library: Path) -> set[str]:
    """The libraries it names, without versions: {"libtorch_cpu", "libc", ...}."""
    found = re.findall(r"\(NEEDED\).*\[(.+?)\.so", "\n".join(lines("readelf", "-d", library)))
    assert "libc" in found
    return set(found)


# ---- the libraries


def test_the_operators_need_no_python() -> None:
    assert not [symbol for symbol in lines("nm", "-D", LIBRARY) if re.search(r"\b_?Py[A-Z_]|pybind11", symbol)]
    assert not [name for name in needed(LIBRARY) if "python" in name]


def test_they_bring_no_openmp_runtime_but_use_one() -> None:
    for library in (LIBRARY, MODULE):
        assert not needed(library) & set(OPENMP)
    assert [symbol for symbol in lines("nm", "-D", LIBRARY) if "U GOMP_parallel" in symbol]


def test_the_module_takes_the_library_beside_it() -> None:
    assert "librope_ext" in needed(MODULE)
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", "\n".join(lines("readelf", "-d", MODULE)))
    assert paths == ["$ORIGIN"]


def test_the_library_alone_has_the_operators() -> None:
    """As a C++ program loads it; a later import of the package finds them there."""
    code = f"""
import sys, torch
torch.ops.load_library({str(LIBRARY)!r})
assert "rope_ext" not in sys.modules
x = torch.ones(1, 1, 1, 2)
assert torch.ops.rope.rotate(x, torch.tensor([[1j]])).tolist() == [[[[-1.0, 1.0]]]]
import rope_ext
"""
    result = run(sys.executable, "-c", code, PYTHONPATH=str(PACKAGE.parent))
    assert result.returncode == 0, result.stderr


def test_a_second_copy_is_refused_by_name(tmp_path: Path) -> None:
    copy = shutil.copy(LIBRARY, tmp_path)
    result = run(sys.executable, "-c", f"import rope_ext, torch; torch.ops.load_library({copy!r})", cwd=PACKAGE.parent)
    assert result.returncode != 0
    assert "Only a single TORCH_LIBRARY can be used to register the namespace rope" in result.stderr


# ---- setup.py, from the source tree


@pytest.mark.parametrize(
    ("environment", "says"),
    (
        ({"CXX": "no-such-compiler"}, ("C++ compiler", "'no-such-compiler'", "install g++")),
        ({"CXX": "true"}, ("g++ 10 or later", "'true'")),
        ({"ROPE_EXT_CUDA": "2"}, ("ROPE_EXT_CUDA must be 0 or 1", "'2'")),
    ),
    ids=("no-compiler", "not-a-compiler", "cuda-2"),
)
def test_setup_refuses_in_one_sentence(environment: dict[str, str], says: tuple[str, ...]) -> None:
    result = run(sys.executable, "setup.py", "--name", **environment)
    assert result.returncode != 0
    assert all(words in result.stderr.splitlines()[-1] for words in says), result.stderr


def setup_where(fact: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py in a Python where a statement about torch has been made true."""
    run_it = "sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py', run_name='__main__')"
    return run(sys.executable, "-c", f"import runpy, sys; {fact}; {run_it}", **environment)


def test_cuda_is_demanded_declined_or_found() -> None:
    """ROPE_EXT_CUDA=1 fails rather than falls back, and names what is missing; unset, the fallback is said aloud."""
    no_cuda = "import torch; torch.version.cuda = None"
    demanded = setup_where(no_cuda, ROPE_EXT_CUDA="1")
    assert demanded.returncode != 0
    assert re.search(r"^ROPE_EXT_CUDA=1, but torch \S+ is a build without CUDA", demanded.stderr, re.MULTILINE)
    unset = setup_where(no_cuda, ROPE_EXT_CUDA="")
    assert unset.returncode == 0 and "building for the CPU only: torch" in unset.stderr
    declined = setup_where(no_cuda, ROPE_EXT_CUDA="0")
    assert declined.returncode == 0 and "CPU only" not in declined.stderr


def test_without_torch_it_says_the_one_command() -> None:
    """As in pip's isolated build environment."""
    result = setup_where("sys.modules['torch'] = None")
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].strip().endswith("&& pip install --no-build-isolation .")


# ---- archives

FACTS = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "setup.py", "pyproject.toml"}


def sources(*folders: str) -> set[str]:
    """Paths of the source files in these folders, from the root."""
    kinds = (".py", ".pyi", ".typed", ".cpp", ".h", ".inl", ".cu", ".cuh", ".sh", ".json")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    return {str(path.relative_to(ROOT)) for path in files if path.name != "_built_for.py"}


def test_the_sdist_is_the_repository(tmp_path: Path) -> None:
    result = run(sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("rope_ext-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in opened.getnames()}
    assert FACTS | sources("csrc", "rope_ext", "tests", "benchmarks") <= names
    assert "csrc/cpu/rotate.inl" in names and "csrc/rope_params.h" in names
    assert not [name for name in names if name.endswith((".so", ".o", "_built_for.py")) or "__pycache__" in name]


def test_the_wheel_is_the_package_and_works_elsewhere(tmp_path: Path) -> None:
    build = ("build", "--build-lib", tmp_path / "lib")
    wheel = ("bdist_wheel", "-b", tmp_path / "bdist", "-d", tmp_path)
    result = run(sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, *build, *wheel)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("rope_ext-*.whl")
    with zipfile.ZipFile(archive) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        opened.extractall(tmp_path / "elsewhere")
    metadata = f"rope_ext-{rope_ext.__version__}.dist-info"
    built = {f"rope_ext/{name}" for name in (MODULE.name, LIBRARY.name, "_built_for.py")}
    assert {name for name in names if name.startswith("rope_ext/")} == sources("rope_ext") | built
    assert {name.split("/")[0] for name in names} == {"rope_ext", metadata}
    assert f"{metadata}/licenses/LICENSE" in names

    call = "torch.ops.rope.rotate(torch.ones(1, 1, 1, 2), torch.tensor([[1j]]))"
    code = f"import rope_ext, torch; print(rope_ext.__file__, {call}.tolist())"
    used = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "elsewhere"))
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(tmp_path)) and used.stdout.endswith("[[[[-1.0, 1.0]]]]\n")
