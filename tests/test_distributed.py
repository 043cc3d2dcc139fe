"""DTensors: on four gloo ranks every sharding gives the bits of one process, and no rank talks to another.

The checks are in distributed_worker.py, which runs once for all of them; here is a test for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_worker import CHECKS

WORKER = Path(__file__).with_name("distributed_worker.py")
# One path for the package and the tests alike, as pytest has made it.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path])}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    results = tmp_path_factory.mktemp("distributed") / "results.json"
    command = [sys.executable, str(WORKER), str(results)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_on_four_ranks(check: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[check], verdicts[check]


def test_importing_rope_ext_before_dtensor_is_enough() -> None:
    """And does not load it. distributed_worker.py imports them the other way round."""
    code = """
import sys, torch
from importlib.util import find_spec
finders = list(sys.meta_path)
import rope_ext
assert "torch.distributed.tensor" not in sys.modules
find_spec("torch.distributed.tensor")  # as those do who only want to know whether it is there
import torch.distributed.tensor
assert sys.meta_path == finders
known = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
for name in ("apply", "rotate"):
    for suffix in ("", "_", "_cos_sin", "_cos_sin_"):
        assert getattr(torch.ops.rope, name + suffix).default in known
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=120)
