"""What is shipped: symbols and needs of the libraries, contents of sdist and wheel; and what setup.py refuses."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils import cpp_extension

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
    """And no path of the machine that built them is searched: torch has loaded the rest."""
    assert "librope_ext" in needed(MODULE)
    for library, paths in ((LIBRARY, []), (MODULE, ["$ORIGIN"])):
        dynamic = "\n".join(lines("readelf", "-d", library))
        assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dynamic) == paths


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


# ---- setup.py, run in this process with a fact made true, and with setuptools.setup() taking notes instead of building


class Outcome(NamedTuple):
    refusal: str  # "" where it went on to build
    extensions: list[Any]
    said: str


Setup = Callable[..., Outcome]


@pytest.fixture
def setup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Setup:
    for name in ("CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "ROPE_EXT_CUDA", "ROPE_EXT_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)

    def run_it(**environment: str) -> Outcome:
        with mock.patch.dict(os.environ, environment), mock.patch("setuptools.setup") as build:
            refusal: Any = ""
            try:
                runpy.run_path("setup.py")
            except SystemExit as stop:
                refusal = stop.code
        return Outcome(refusal, build.call_args.kwargs["ext_modules"] if build.called else [], capsys.readouterr().err)

    return run_it


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def toolkit(folder: Path, version: str) -> str:
    """A folder that looks like a CUDA toolkit to everyone who does not compile with it."""
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    script(
        folder / "bin" / "nvcc",
        f"""case "$*" in *--version*) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
*--list-gpu-arch*) echo compute_80; echo compute_90 ;; esac""",
    )
    return str(folder)


@pytest.mark.parametrize(
    ("environment", "says"),
    (
        ({"CXX": "no-such-compiler"}, ("C++ compiler", "'no-such-compiler'", "install g++")),
        ({"CXX": "no-such-wrapper g++"}, ("C++ compiler", "'no-such-wrapper'", "install g++")),
        ({"CXX": "true"}, ("g++ 10 or later", "'true'", "set CXX")),
        ({"ROPE_EXT_CUDA": "2"}, ("ROPE_EXT_CUDA must be 0 or 1", "'2'")),
    ),
    ids=("no-compiler", "no-wrapper", "not-a-compiler", "cuda-2"),
)
def test_a_wrong_environment_is_refused(setup: Setup, environment: dict[str, str], says: tuple[str, ...]) -> None:
    refusal = setup(**environment).refusal
    assert all(words in refusal for words in says), refusal


@pytest.mark.parametrize(
    ("place", "value", "says"),
    (
        ("torch.__version__", TorchVersion("2.5.1+cu124"), ("torch 2.6 or later", "2.5.1", "pip install 'torch>=2.6'")),
        ("setuptools.__version__", "65.5.0", ("setuptools 77 or later", "65.5.0", "pip install 'setuptools>=77'")),
        ("sysconfig.get_path", lambda name: "/nowhere", ("no Python.h", "/nowhere", "install python3.")),
        ("sys.platform", "darwin", ("builds on Linux",)),
    ),
    ids=("old-torch", "old-setuptools", "no-headers", "no-linux"),
)
def test_a_wrong_python_is_refused(setup: Setup, place: str, value: object, says: tuple[str, ...]) -> None:
    with mock.patch(place, value):
        refusal = setup().refusal
    assert all(words in refusal for words in says), refusal


def test_without_torch_it_says_the_one_command(setup: Setup) -> None:
    """As in pip's isolated build environment."""
    with mock.patch.dict(sys.modules, {"torch": None}):
        assert setup().refusal.endswith("&& pip install --no-build-isolation .")


def test_compilers_of_two_words_and_old_ones(setup: Setup, tmp_path: Path) -> None:
    assert "-ffp-contract=off" in setup(CXX="env c++").extensions[0].extra_compile_args["cxx"]
    gcc_9 = script(tmp_path / "g++-9", "echo '#define __GNUC__ 9'")
    assert re.search(r"g\+\+ 10 or later.*/g\+\+-9' is older", setup(CXX=str(gcc_9)).refusal)


def test_cuda_is_demanded_declined_or_found(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROPE_EXT_CUDA=1 fails rather than falls back, and names what is missing; unset, the fallback is said aloud."""
    home = toolkit(tmp_path, "12.6")
    monkeypatch.setattr(torch.version, "cuda", None)
    refusal = setup(CUDA_HOME=home, ROPE_EXT_CUDA="1").refusal
    assert re.fullmatch(
        r"ROPE_EXT_CUDA=1, but torch \S+ is a build without CUDA: install .* or unset ROPE_EXT_CUDA", refusal
    )
    fallen_back, declined = setup(CUDA_HOME=home), setup(CUDA_HOME=home, ROPE_EXT_CUDA="0")
    assert "building for the CPU only: torch" in fallen_back.said and "CPU only" not in declined.said
    assert not [file for done in (fallen_back, declined) for file in done.extensions[0].sources if ".cu" in file]

    monkeypatch.setattr(torch.version, "cuda", "12.6")
    found = setup(CUDA_HOME=home)
    assert "csrc/cuda/rotate.cu" in found.extensions[0].sources
    assert f"building CUDA kernels for 8.0;9.0+PTX with {home}" in found.said
    assert "csrc/cuda/rotate.cu" not in setup(CUDA_HOME=home, ROPE_EXT_CUDA="0").extensions[0].sources

    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path, **options: path.name != "nvcc" and exists(path, **options))
    assert re.fullmatch(r"ROPE_EXT_CUDA=1, but no CUDA toolkit .*set CUDA_HOME.*", setup(ROPE_EXT_CUDA="1").refusal)
    assert "building for the CPU only: no CUDA toolkit" in setup().said


def test_a_toolkit_that_torch_does_not_fit_is_refused(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    refusal = setup(CUDA_HOME=toolkit(tmp_path, "12.6")).refusal
    assert "CUDA 12.6" in refusal and "set CUDA_HOME to a toolkit 13.0, or ROPE_EXT_CUDA=0" in refusal


@pytest.mark.parametrize(
    ("asked", "archs"),
    (
        ("Hopper", "sm_90|compute_90"),
        ("8.0 9.0a+PTX", "sm_80|sm_90a|compute_90a"),
        pytest.param("10.0;8.6", "sm_86|sm_100", marks=pytest.mark.skipif(torch.__version__ < "2.8", reason="no 10.0")),
        ("", "sm_80|sm_90|compute_90"),
    ),
    ids=("by-name", "spaces", "order", "unset"),
)
def test_the_build_names_the_architectures_that_torch_takes(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, archs: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    done = setup(CUDA_HOME=toolkit(tmp_path, "12.8"), TORCH_CUDA_ARCH_LIST=asked)
    assert ("ROPE_CUDA_ARCHS", archs) in done.extensions[0].define_macros


def test_old_nvcc_and_wrong_architectures(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--compress-mode came with CUDA 12.8; an older nvcc ends at an option that it does not know."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for version, compresses in (("12.6", False), ("12.8", True), ("12.10", True)):
        (tmp_path / version).mkdir()
        flags = setup(CUDA_HOME=toolkit(tmp_path / version, version)).extensions[0].extra_compile_args["nvcc"]
        assert ("--compress-mode=size" in flags) == compresses and "--fmad=false" in flags
    refusal = setup(CUDA_HOME=str(tmp_path / version), TORCH_CUDA_ARCH_LIST="sm_90").refusal
    assert "'sm_90'" in refusal and "such as '8.0;9.0+PTX'" in refusal


# ---- archives

FACTS = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "setup.py", "pyproject.toml"}
VERSION = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
BUILT = re.compile(r"\.so$|\.o$|\.pyc$|/_built_for\.py$|/(__pycache__|\.\w+_cache)(/|$)")


def sources(*folders: str) -> set[str]:
    """Paths of the files in these folders, from the root, without what a build or a run has left there."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {name for name in (str(path.relative_to(ROOT)) for path in files) if not BUILT.search(name)}


def test_the_version_is_written_in_one_place() -> None:
    """pyproject.toml tells the libraries, the package and the archives; the change log has an entry for it."""
    assert rope_ext.__version__ == _C.version() == VERSION
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()
    code = [ROOT / name for name in sources("csrc", "rope_ext", "docs") if name.endswith((".py", ".cpp", ".h"))]
    assert not [path for path in (ROOT / "setup.py", *code) if f'"{VERSION}"' in path.read_text()]


def test_the_sdist_is_the_repository(tmp_path: Path) -> None:
    result = run(sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("rope_ext-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in opened.getnames()}
    assert FACTS | sources("csrc", "rope_ext", "tests", "benchmarks", "docs", ".ci") <= names
    assert {"csrc/cpu/rotate.inl", "rope_ext/py.typed", "rope_ext/_C.pyi", "docs/index.md", ".ci/run"} <= names
    assert not [name for name in names if BUILT.search(name)]


def test_the_wheel_is_the_package_and_works_elsewhere(tmp_path: Path) -> None:
    build = ("build", "--build-lib", tmp_path / "lib")
    # it would build a second time, with every flag twice: that compiles everything anew
    wheel = ("bdist_wheel", "--skip-build", "-b", tmp_path / "bdist", "-d", tmp_path)
    result = run(sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, *build, *wheel)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("rope_ext-*.whl")
    with zipfile.ZipFile(archive) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        opened.extractall(tmp_path / "elsewhere")
    metadata = f"rope_ext-{VERSION}.dist-info"
    built = {f"rope_ext/{name}" for name in (MODULE.name, LIBRARY.name, "_built_for.py")}
    assert {name for name in names if name.startswith("rope_ext/")} == sources("rope_ext") | built
    assert {"rope_ext/py.typed", "rope_ext/_C.pyi"} < names
    assert {name.split("/")[0] for name in names} == {"rope_ext", metadata}
    assert f"{metadata}/licenses/LICENSE" in names

    call = "torch.ops.rope.rotate(torch.ones(1, 1, 1, 2), torch.tensor([[1j]]))"
    code = f"import rope_ext, torch; print(rope_ext.__file__, {call}.tolist())"
    used = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "elsewhere"))
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(tmp_path)) and used.stdout.endswith("[[[[-1.0, 1.0]]]]\n")
