"""The doctor: is this rope_ext well, and if not, what to type.

    python -m rope_ext [--json]

Prints versions and how the extension was built, tests every device against ``rope_ext.reference``, times a rotation
against a copy. The exit status is 0 if all is well, else 1. This file imports nothing of the package before it knows
that it can, so that ``python PATH/rope_ext``, the folder, runs even where ``import rope_ext`` fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# where the sources are here, an install would leave the libraries beside them as they are
REBUILD = "pip install --no-build-isolation --no-deps " + (
    "-e ." if (HERE.parent / "setup.py").exists() else "--force-reinstall ."
)
# what csrc/cpu/isa.cpp asks of a CPU, as /proc/cpuinfo spells it
LEVELS = {"avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c"}, "avx2": {"avx2", "fma", "f16c"}}


def facts() -> dict[str, Any]:
    """What can be seen without running a kernel; of what cannot be imported only the error."""
    found: dict[str, Any] = {"folder": str(HERE), "python": platform.python_version(), "machine": platform.machine()}
    found |= {"torch": None, "built_for": None, "error": None, "gpus": [], "torch_cuda": None, "build": None}
    found |= {"cpu_isa_machine": _machine_isa(), "ATEN_CPU_CAPABILITY": os.environ.get("ATEN_CPU_CAPABILITY")}
    found |= {"nvcc": _nvcc(), "driver": Path("/proc/driver/nvidia/version").exists()}
    if (note := HERE / "_built_for.py").exists():
        found["built_for"] = note.read_text().rpartition("TORCH = ")[2].strip().strip('"')
    try:
        import torch

        found |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
        if found["built_for"] == torch.__version__:  # another torch may not survive loading the library
            found["build"] = importlib.import_module("rope_ext").build_info()
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                name, capability = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
                found["gpus"].append({"name": name, "capability": list(capability)})
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _machine_isa() -> str:
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    return next((level for level, needed in LEVELS.items() if needed <= flags), "default")


def _nvcc() -> str | None:
    places = (os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", ""), "/usr/local/cuda/bin")
    return shutil.which("nvcc", path=os.pathsep.join(places))


def problems(found: Mapping[str, Any]) -> list[str]:
    """A sentence for everything that is wrong, each with what to type."""
    if found["torch"] is None:
        return [f"torch cannot be imported ({found['error']}): install it first, then rope_ext"]
    if found["built_for"] is None:
        return [
            f"rope_ext is not built in {HERE}: run `pip install --no-build-isolation -e .` in its source folder; if it "
            "is installed, leave this folder, where Python finds the sources first"
        ]
    rebuild = f"rebuild it with `{REBUILD}` in its source folder"
    if found["built_for"] != found["torch"]:
        return [f"rope_ext was built for torch {found['built_for']} and this is torch {found['torch']}: {rebuild}"]
    if found["build"] is None:
        return [f"rope_ext cannot be loaded ({found['error']}): {rebuild}"]

    wrong, build, gpus = [], found["build"], found["gpus"]
    if found["driver"] and not gpus:
        cure = (
            "its driver may be too old" if found["torch_cuda"] else "install a CUDA build of it, then rebuild rope_ext"
        )
        wrong.append(f"this machine has an NVIDIA driver, but torch {found['torch']} sees no GPU: {cure}")
    if gpus and build["cuda"] is None:
        how = f"rebuild it with `ROPE_EXT_CUDA=1 {REBUILD}` in its source folder"
        if found["nvcc"] is None:
            how = f"install CUDA {found['torch_cuda']} with nvcc, which was not found (or set CUDA_HOME), then {how}"
        wrong.append(f"rope_ext was built without CUDA kernels, so that CUDA tensors take slow ATen operations: {how}")
    for i, gpu in enumerate(gpus if build["cuda"] else []):
        major, minor = gpu["capability"]
        if not _runs_on(major, minor, build["cuda"]["archs"]):
            wrong.append(
                f"GPU {i}, {gpu['name']}, needs kernels for {major}.{minor}, and there are {build['cuda']['archs']}: "
                f"`TORCH_CUDA_ARCH_LIST={major}.{minor}+PTX ROPE_EXT_CUDA=1 {REBUILD}` in its source folder makes them"
            )
    variable, isa, machine = found["ATEN_CPU_CAPABILITY"], build["cpu_isa"], found["cpu_isa_machine"]
    faster = build["cpu_isa_built"][build["cpu_isa_built"].index(isa) + 1 :]
    if variable and machine in faster:
        wrong.append(
            f"ATEN_CPU_CAPABILITY={variable} holds torch and rope_ext at {isa}, and this CPU has {machine}: "
            "`unset ATEN_CPU_CAPABILITY`"
        )
    return wrong


def _runs_on(major: int, minor: int, archs: Sequence[str]) -> bool:
    """Machine code runs on its own major version from its minor one up, PTX on everything from its version up."""
    for kind, _, number in (arch.partition("_") for arch in archs):
        have = divmod(int(number.rstrip("af")), 10)
        newer_too = number.isdigit() and (kind == "compute" or have[0] == major)  # sm_90a is for that one GPU
        if have == (major, minor) or (newer_too and have < (major, minor)):
            return True
    return False


def self_test(device: str) -> None:
    """Every dtype and pairing, whole and partial, fresh and in place, bit for bit; AssertionError where one differs."""
    import torch

    from rope_ext import reference

    random = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for head_dim, rotary_dim in ((128, None), (80, 48), (10, None)):
            x = torch.randn(2, 7, 5, head_dim, generator=random).to(dtype)
            table = torch.randn(40, (rotary_dim or head_dim) // 2, dtype=torch.complex64, generator=random)
            positions = torch.randint(0, 40, (2, 7), generator=random)
            for interleaved in (True, False):
                options = (interleaved, rotary_dim)
                expected = reference.rotate(x, table, positions, *options)
                there = [tensor.to(device) for tensor in (x, table, positions)]
                fresh = torch.ops.rope.rotate(*there, *options)
                torch.ops.rope.rotate_(*there, *options)
                for name, out in (("rotate", fresh), ("rotate_", there[0])):
                    if not torch.equal(out.cpu(), expected):
                        raise AssertionError(f"{name} is not the reference, {dtype}, head_dim {head_dim}, {options}")


def over_copy(device: str) -> float:
    """The time of ``apply`` over that of cloning xq and xk: bfloat16, 512 tokens, 32 and 8 heads of 128, one thread."""
    import torch

    xq, xk = (torch.randn(1, 512, heads, 128, device=device).bfloat16() for heads in (32, 8))
    table = torch.ones(512, 64, dtype=torch.complex64, device=device)

    def seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(10):
            call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a busy machine makes several wait for each other
    with torch.inference_mode():
        calls = (lambda: torch.ops.rope.apply(xq, xk, table)), (lambda: (xq.clone(), xk.clone()))
        rounds = [[seconds(call) for call in calls] for _ in range(25)]
    torch.set_num_threads(threads)
    ours, copy = (min(times) for times in zip(*rounds, strict=True))
    return float(ours / copy)


def examine(found: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The devices' results, and what is wrong with them."""
    results, wrong = {}, []
    for device in ("cpu", *(f"cuda:{i}" for i in range(len(found["gpus"])))):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of missing CUDA kernels: it is said above
                self_test(device)
                results[device] = {"self_test": "ok", "over_copy": round(over_copy(device), 2)}
        except Exception as error:
            results[device] = {"self_test": f"{type(error).__name__}: {error}"}
            wrong.append(f"the self-test fails on {device} ({error}): rebuild with `{REBUILD}`; if it stays, report it")
    return results, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rope_ext", description="Is this rope_ext well?")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options, found = parser.parse_args(arguments), facts()
    results, failed = examine(found) if found["build"] else ({}, [])
    wrong = problems(found) + failed
    if options.json:
        print(json.dumps({"ok": not wrong, "problems": wrong, "facts": found, "devices": results}, indent=2))
        return bool(wrong)
    for name, value in {**(found.pop("build") or {}), **found}.items():
        print(f"{name:>20}  {value}")
    for device, result in results.items():
        ratio = f", a rotation takes {result['over_copy']} of a copy's time" if "over_copy" in result else ""
        print(f"{device:>20}  self-test: {result['self_test']}{ratio}")
    print("\n" + ("\n".join(f"WRONG: {sentence}" for sentence in wrong) or "All is well."))
    return bool(wrong)


if __name__ == "__main__":
    if not __package__:  # run by its path: Python would look for modules in here
        sys.path[0] = str(HERE.parent)
    sys.exit(main())
