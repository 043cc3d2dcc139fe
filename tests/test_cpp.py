"""tests/cpp, a program without Python, serves SmolLM2's attention block with Python's bits, as docs/cpp.md says."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rope_ext
from cases import BF16, place_pair, unit_table
from harness import assert_same
from rope_ext import reference

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cpp.md").read_text()
THREADS = 2  # in both programs: the sums of matrix products depend on it
ROWS = 64  # of the cache


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


class AttentionBlock(nn.Module):
    """The first half of the first decoder layer of SmolLM2: LLaMA's code, cache included, around the operator."""

    def __init__(self) -> None:
        super().__init__()
        smollm2 = importlib.import_module("benchmarks.smollm2")
        llama = importlib.import_module("benchmarks.llama")
        model = smollm2.SmolLM2(smollm2.find_weights())
        name = "layers.0."
        weights = {k[len(name) :]: w for k, w in model.load_weights(torch.float32).items() if k.startswith(name)}
        self.layer = llama.TransformerBlock(model.args, torch.ops.rope.apply)
        self.layer.load_state_dict(weights)
        for cache in ("cache_k", "cache_v"):
            shape = (8, ROWS, model.args.n_kv_heads, model.args.head_dim)
            self.layer.attention.register_buffer(cache, torch.zeros(shape), persistent=False)
        self.freqs_cis = rope_ext.precompute_freqs_cis(model.args.head_dim, ROWS, model.args.rope_theta)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        return x + self.layer.attention(self.layer.attention_norm(x), 0, freqs_cis, mask)

    def inputs(self, batch: int, seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(batch, seqlen, self.layer.attention.wq.in_features)
        return x, self.freqs_cis[:seqlen].clone(), torch.ones(seqlen, seqlen, dtype=torch.bool).tril()


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """cmake at work, beside what Python does meanwhile."""
    scripts = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=os.pathsep.join((str(scripts), os.environ["PATH"])))
    if cmake is None:
        pytest.skip("no cmake: pip install cmake")
    if torch.version.cuda and not shutil.which("nvcc"):
        pytest.skip("the CMake files of a CUDA build of torch demand a CUDA toolkit, and nvcc is not on PATH")
    folder = tmp_path_factory.mktemp("cpp")
    configure = [cmake, "-S", str(ROOT / "tests" / "cpp"), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"]
    command = 'cmake=$1 folder=$5; "$@" && exec "$cmake" --build "$folder"'
    environment = {**os.environ, "PYTHONPATH": str(Path(rope_ext.__file__).parents[1])}
    with subprocess.Popen(
        ["sh", "-c", command, "sh", *configure],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process, folder / "serve"


@pytest.fixture(scope="module")
def block(building: object) -> AttentionBlock:
    for package in ("gguf", "tokenizers", "tqdm", "jinja2"):
        pytest.importorskip(package, reason=f"the weights need the package {package}")
    try:
        return AttentionBlock().eval()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def package(block: AttentionBlock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the page's own lines."""
    folder = tmp_path_factory.mktemp("package")
    names = {"model": block, "inputs": block.inputs(2, 7)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        patch.chdir(folder)
        torch.set_num_threads(THREADS)
        exec("\n".join(snippets("python")), names)
    return folder / "model.pt2"


@pytest.fixture(scope="module")
def program(building: tuple[subprocess.Popen[str], Path], package: Path) -> Path:
    process, path = building
    log, _ = process.communicate()
    assert process.returncode == 0, log
    return path


def serve(program: Path, package: Path, calls: list[list[Tensor]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs it on these calls; folder/out has the results, folder/loaded.PID what the dynamic linker did."""
    torch.save(calls, folder / "in")
    environment = {"OMP_NUM_THREADS": str(THREADS), "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(folder / "loaded")}
    kept = {key: os.environ[key] for key in ("ATEN_CPU_CAPABILITY", "TMPDIR") if key in os.environ}
    command = [str(path) for path in (program, package, folder / "in", folder / "out")]
    return subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=120)


def test_a_program_without_python_has_pythons_bits(
    program: Path, package: Path, block: AttentionBlock, tmp_path: Path
) -> None:
    torch.set_num_threads(THREADS)
    pair, table = place_pair("sliced", (2, 7, 4, 80), BF16), unit_table(80, 3, 7)
    calls = [block.inputs(*shape) for shape in ((2, 7), (3, 33), (1, 1), (5, 63))]
    in_python = torch._inductor.aoti_load_package(str(package))
    expected = [*reference.apply(*pair, table), *(in_python(*call) for call in calls)]
    for call, result in zip(calls, expected[2:], strict=True):
        with torch.no_grad():
            torch.testing.assert_close(result, block(*call), rtol=1e-5, atol=1e-5)

    done = serve(program, package, [[*pair, table], *map(list, calls)], tmp_path)
    assert done.returncode == 0, done.stderr
    for i, (out, want) in enumerate(zip(torch.load(tmp_path / "out"), expected, strict=True)):
        assert_same(out, want, f"result {i}")

    (log,) = tmp_path.glob("loaded.*")
    loaded = {Path(path).name for path in re.findall(r"calling init: (\S+)", log.read_text())}
    assert {"librope_ext.so", "libtorch_cpu.so"} <= loaded and any(name.endswith(".wrapper.so") for name in loaded)
    assert not [name for name in loaded if "python" in name]


def test_it_is_refused_like_python(program: Path, package: Path, tmp_path: Path) -> None:
    q, k, short = torch.zeros(2, 7, 4, 16), torch.zeros(2, 7, 1, 16), unit_table(16, 0, 6)
    with pytest.raises(ValueError, match="must have one row per token") as error:
        torch.ops.rope.apply(q, k, short)
    done = serve(program, package, [[q, k, short]], tmp_path)
    assert done.returncode == 1 and done.stderr.strip() == str(error.value)


def test_the_page_quotes_the_program() -> None:
    source = (ROOT / "tests" / "cpp" / "main.cpp").read_text()
    assert snippets("cmake") == [(ROOT / "tests" / "cpp" / "CMakeLists.txt").read_text()]
    quoted = snippets("cpp")
    assert quoted and all(piece in source for piece in quoted)
