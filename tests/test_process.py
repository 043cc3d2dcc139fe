"""What the library does to its process: instruction sets, threads, forks, denormals, imports. Linux is assumed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import rope_ext
from cases import BF16, Case, Inputs, each_case, place_pair, random_table
from harness import assert_same, check, forms, formula, op, twins

LEVELS = ("default", "avx2", "avx512")


def run(code: str, timeout: int = 120, **environment: str | None) -> str:
    """Runs a program of its own with the tests' modules at hand; what it prints."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    wanted = {**os.environ, "PYTHONPATH": path, **environment}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={key: value for key, value in wanted.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Each level's digest of the same inputs (exact ones, because torch.randn has other bits on every level), and Meta's own
# code run at that level.
BITS_OF_THIS_LEVEL = """
import hashlib, torch, rope_ext
from cases import *
from harness import assert_same, forms, op
from rope_ext import reference
torch.set_num_threads(1)
torch.manual_seed(3)
digest = hashlib.sha256()
def exact(x):
    x = torch.view_as_real(x) if x.is_complex() else x
    x.copy_(torch.randint(-(2**20), 2**20, x.shape) / 2**18)
def add(inputs):
    for x in (*inputs[:2], *([inputs.table] if isinstance(inputs.table, Tensor) else inputs.table)):
        exact(x)
    for suffix, tables in forms(inputs.table):
        outs = op(f"apply{suffix}")(*inputs[:2], *tables, *inputs[3:])
        op(f"apply{suffix}_")(*inputs[:2], *tables, *inputs[3:])
        for out in (*outs, *inputs[:2]):
            digest.update(out.contiguous().view(torch.uint8).numpy().tobytes())
for case in CASES:
    add(case.make())
for head_dim in HEAD_DIMS:
    for dtype in DTYPES:
        for layout, interleaved in (("sliced", True), ("sliced", False), ("stepped", True), ("dense-at-1", False)):
            pair = place_pair(layout, (2, 3, 5, head_dim), dtype)
            add(Inputs(*pair, random_table((3, head_dim // 2)), None, interleaved))
for head_dim in META_DIMS:
    table = unit_table(head_dim, 11, 9)
    for dtype in (F32, F16, BF16):
        pair = [x.clone() for x in place_pair("dense", (2, 9, 3, head_dim), dtype)]
        for a, b in zip(op("apply")(*pair, table), reference.apply_rotary_emb(*pair, table), strict=True):
            assert_same(a, b)
print(rope_ext.build_info()["cpu_isa"], digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    best, bits = run(BITS_OF_THIS_LEVEL, ATEN_CPU_CAPABILITY=None).split()
    levels = rope_ext.build_info()["cpu_isa_built"]
    assert best in levels
    for level in levels[: levels.index(best) + 1]:
        assert run(BITS_OF_THIS_LEVEL, ATEN_CPU_CAPABILITY=level).split() == [level, bits]
    missing = levels[levels.index(best) + 1 :]
    if missing:
        pytest.skip(f"this CPU has no {missing}; the levels it has agree")


@each_case
@pytest.mark.parametrize("threads", (1, 2, 3, 5))
def test_cases_on_any_number_of_threads(threads: int, case: Case) -> None:
    torch.set_num_threads(threads)
    check(*case.make())


def test_eight_threads_at_once() -> None:
    inputs = [Case("big", (1, 61 + i, 9, 80), 3).make() for i in range(8)]
    expected = [formula(*each) for each in inputs]

    def work(i: int) -> None:
        for _ in range(20):
            for call, rest in ((op("apply"), inputs[i][3:]), (rope_ext.apply_rotary_emb, ())):
                for out, want in zip(call(*inputs[i][:3], *rest), expected[i], strict=True):
                    assert_same(out, want)
            copies = [x.clone() for x in inputs[i][:2]]
            op("apply_")(*copies, *inputs[i][2:])
            for out, want in zip(copies, expected[i], strict=True):
                assert_same(out, want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_importing_changes_nothing_else() -> None:
    run("""
import os, random, sys, threading, warnings
import torch
import numpy
def state():
    return (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()), torch.get_num_threads(),
            torch.get_num_interop_threads(), torch.get_default_dtype(), dict(os.environ), list(warnings.filters),
            threading.active_count(), sys.getswitchinterval(), torch.is_grad_enabled(),
            len(os.listdir("/proc/self/task")))
before = state()
import rope_ext
assert state() == before
""")


def test_importing_twice_is_safe() -> None:
    assert (
        run("""
import importlib, pathlib, sys, torch
import rope_ext, rope_ext
importlib.reload(rope_ext)
library = pathlib.Path(rope_ext.__file__).with_name("librope_ext.so")
torch.ops.load_library(library)
torch.ops.load_library(str(library))
for name in [name for name in sys.modules if name.startswith("rope_ext")]:
    del sys.modules[name]
import rope_ext
x = torch.ones(1, 1, 1, 2)
print(torch.ops.rope.rotate(x, torch.tensor([[1j]])).tolist())
""")
        == "[[[[-1.0, 1.0]]]]"
    )


def test_denormals_still_work_in_every_thread() -> None:
    run("""
import threading, torch
import rope_ext
torch.set_num_threads(3)
x = torch.randn(2, 301, 33, 80)
def use_and_look():
    for y in (x, x.bfloat16(), x.half(), x.double()):
        torch.ops.rope.rotate(y, torch.randn(301, 40, dtype=torch.complex64))
    for dtype, small in ((torch.float32, 1e-40), (torch.float64, 1e-310)):
        for tensor in (torch.full((4_000_000,), small, dtype=dtype), torch.full((1,), small, dtype=dtype)):
            assert (tensor * 1).count_nonzero() == tensor.numel()
    assert 5e-324 * 1.0 != 0
use_and_look()
failed = []
def in_thread():
    try:
        use_and_look()
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=in_thread) for _ in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
""")


def test_no_second_openmp_runtime() -> None:
    assert (
        int(
            run("""
import re, torch
import rope_ext
torch.ops.rope.rotate(torch.randn(2, 301, 33, 80), torch.randn(301, 40, dtype=torch.complex64))
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"/\\S*/lib(?:gomp|iomp|omp)[^\\s/]*", maps))))
""")
        )
        <= 1
    )


@pytest.mark.parametrize("used_before", (True, False), ids=("after-use", "before-use"))
def test_a_forked_child_can_call_it(used_before: bool) -> None:
    """After use the threads of the parent are gone, and OpenMP's as ever may not be asked for by the child."""
    assert (
        run(
            f"""
import os, signal, torch
import rope_ext
from rope_ext import reference
torch.set_num_threads(2)
x, table = torch.randn(2, 301, 33, 80), torch.randn(301, 40, dtype=torch.complex64)
if {used_before}:
    torch.ops.rope.rotate(x, table)
child = os.fork()
if child == 0:
    signal.alarm(20)
    q, k = torch.randn(1, 1, 32, 128), torch.randn(1, 1, 8, 128)
    row = torch.randn(1, 64, dtype=torch.complex64)
    right = all(map(torch.equal, torch.ops.rope.apply(q, k, row), reference.apply(q, k, row)))
    if {used_before}:
        torch.set_num_threads(1)
    right = right and torch.equal(torch.ops.rope.rotate(x, table), reference.rotate(x, table))
    os._exit(0 if right else 1)
assert torch.equal(torch.ops.rope.rotate(x, table), reference.rotate(x, table))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
            timeout=60,
        )
        == "0"
    )


class InWorkers(Dataset):
    """Inputs of one decode step and of a call that is cut between threads, and what a worker makes of them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Inputs, tuple[Tensor, Tensor]]:
        torch.manual_seed(i)
        tokens = (1, 301)[i % 2]
        inputs = Inputs(*place_pair("dense", (2, tokens, 9, 80), BF16), random_table((tokens, 40)).contiguous())
        return inputs, op("apply")(*inputs)


@pytest.mark.parametrize("start", ("fork", "spawn"))
def test_data_loader_workers(start: str) -> None:
    for inputs, outs in DataLoader(InWorkers(), batch_size=None, num_workers=2, multiprocessing_context=start):
        for out, want in zip(outs, formula(*inputs), strict=True):
            assert_same(out, want)


@pytest.mark.parametrize("limit", ("OMP_NUM_THREADS", "one core"))
def test_it_takes_the_threads_it_is_given(limit: str) -> None:
    run(
        f"""
import os
if {limit!r} == "one core":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import torch
import rope_ext
from rope_ext import reference
def rotate():
    before = len(os.listdir("/proc/self/task"))
    return torch.ops.rope.rotate(x, table), len(os.listdir("/proc/self/task")) - before
x, table = torch.randn(2, 301, 33, 80), torch.randn(301, 40, dtype=torch.complex64)
one, started = rotate()
assert started == 0, started
torch.set_num_threads(3)
three, started = rotate()
assert started == 2, started
assert torch.equal(one, reference.rotate(x, table)) and torch.equal(one, three)
""",
        OMP_NUM_THREADS="1" if limit == "OMP_NUM_THREADS" else None,
    )


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has an interpreter lock")
def test_a_free_threaded_python_stays_so() -> None:
    assert run("import sys, torch, rope_ext; print(sys._is_gil_enabled())", PYTHON_GIL=None) == "False"


def test_a_decode_step_starts_no_thread() -> None:
    run("""
import os, torch
import rope_ext
def threads():
    return sorted(os.listdir("/proc/self/task"))
before = threads()
for dtype in (torch.float32, torch.bfloat16):
    q, k = torch.zeros(1, 1, 32, 128, dtype=dtype), torch.zeros(1, 1, 8, 128, dtype=dtype)
    table = torch.ones(1, 64, dtype=torch.complex64)
    torch.ops.rope.apply(q, k, table)
    torch.ops.rope.apply_(q, k, table)
assert threads() == before
""")


@each_case
def test_a_device_without_kernels_runs_the_same_formula(case: Case) -> None:
    """The kernel that such a device would be given, on CPU tensors."""
    elsewhere = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    xq, xk, table, *options = case.make()
    for suffix, tables in forms(table):
        expected = formula(xq, xk, table, *options)
        outs = op(f"apply{suffix}").redispatch(elsewhere, xq, xk, *tables, *options)
        for x, out, want in zip((xq, xk), outs, expected, strict=True):
            assert_same(out, want)
            assert out.stride() == torch.empty_like(x).stride()
        copies = twins((xq, xk))
        assert op(f"apply{suffix}_").redispatch(elsewhere, *copies, *tables, *options) is None
        for out, want in zip(copies, expected, strict=True):
            assert_same(out, want)
        with pytest.raises(ValueError, match=f"rope::rotate{suffix}: "):
            op(f"rotate{suffix}").redispatch(elsewhere, xq[..., :-1], *tables, *options)
