"""Devices, seeds and the hypothesis profile.

The suite runs on the CPU, and on CUDA too where torch sees a device. ROPE_EXT_REQUIRE_CUDA=1 makes a run without CUDA
kernels an error instead of a shorter run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import rope_ext

HAS_CUDA = torch.cuda.is_available()
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=300, database=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("ROPE_EXT_REQUIRE_CUDA") == "1":
        if not HAS_CUDA:
            raise pytest.UsageError("ROPE_EXT_REQUIRE_CUDA=1, but torch sees no CUDA device")
        if rope_ext.build_info()["cuda"] is None:
            raise pytest.UsageError("ROPE_EXT_REQUIRE_CUDA=1, but rope_ext was built without CUDA kernels")


def pytest_report_header(config: pytest.Config) -> str:
    cuda = "cuda" if HAS_CUDA else "no CUDA device: its half of every test is left out"
    return f"rope_ext: {rope_ext.build_info()}, torch {torch.__version__}, {cuda}"


@pytest.fixture(params=["cpu", *(["cuda"] if HAS_CUDA else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True, scope="session")
def _own_compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What an older build compiled is not met again, and all tests share the headers that Inductor precompiles."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(1234)
    yield
    torch.set_num_threads(threads)
