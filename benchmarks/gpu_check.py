"""Judges the CUDA kernels on a machine with a GPU, in at most ten minutes: builds them for the GPU that is there (in
place, in rope_ext/), tests them, looks for memory errors, and measures them against a copy of the same bytes and
against what else is importable.

    python benchmarks/gpu_check.py              # everything; writes benchmarks/results/gpu.json
    python benchmarks/gpu_check.py --no-gpu     # a rehearsal on the CPU with the rope_ext that is installed
    python benchmarks/gpu_check.py --only bits  # one stage; repeatable

Needs a CUDA build of torch, nvcc, g++ and pytest with hypothesis; no network. Every stage is a process with a time
limit of its own, and its verdict and its rows are on disk as soon as they exist: a run that is cut short still tells
what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-check"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
WORKERS = ROOT / "benchmarks" / "gpu"
TOTAL = 590  # seconds


@dataclass
class Stage:
    name: str
    seconds: int  # its time limit
    what: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


def stages(no_gpu: bool, architecture: str) -> list[Stage]:
    device = "cpu" if no_gpu else "cuda"
    here = {"PYTHONPATH": str(ROOT)}
    python = [sys.executable, "-u"]
    build = [*python, "setup.py", "build_ext", "--inplace", "--build-temp", str(BUILD)]
    for_this_gpu = {"ROPE_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architecture}
    behaviour = [*python, str(WORKERS / "behaviour.py"), device]
    speed = [*python, str(WORKERS / "speed.py"), device]
    sanitizer = [] if no_gpu else [compute_sanitizer(), "--error-exitcode=9"]
    memory, initial = ([] if no_gpu else [f"--tool={tool}"] for tool in ("memcheck", "initcheck"))
    uncached = here | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    suite = ["tests/test_values.py"] if no_gpu else ["--maxfail=20", "-k", "not demo and not test_cuda"]
    required = here | ({} if no_gpu else {"ROPE_EXT_REQUIRE_CUDA": "1"})
    return [
        *([] if no_gpu else [Stage("build", 240, f"for compute capability {architecture}", build, for_this_gpu)]),
        Stage("bits", 60, "the bits of the CPU operators on every kernel", [*behaviour, "bits"], here),
        Stage("behaviour", 60, "graphs, streams, tensors above 2^31 elements", [*behaviour, "behaviour"], here),
        Stage("benchmark", 180, "against a copy and the peers", speed, here),
        Stage("memcheck", 45, "a small selection", [*sanitizer, *memory, *behaviour, "selection"], uncached),
        Stage("initcheck", 45, "a small selection", [*sanitizer, *initial, *behaviour, "selection"], uncached),
        Stage("suite", 300, "the tests, on CUDA too", [*python, "-m", "pytest", "-q", *suite], required),
    ]


def compute_sanitizer() -> str:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    beside = [home / "bin" / "compute-sanitizer", home / "compute-sanitizer" / "compute-sanitizer"]
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in beside if path.exists()), "compute-sanitizer"
    )


def machine(no_gpu: bool) -> dict[str, Any]:
    """Facts about where this runs. Raises SystemExit where a GPU is needed and missing."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "gpu": None}
    if no_gpu:
        return facts
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here: run on a machine with one, or rehearse with --no-gpu")
    properties = torch.cuda.get_device_properties(0)
    facts |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    facts |= {"memory_gib": round(properties.total_memory / 2**30), "l2_mib": properties.L2_cache_size / 2**20}
    return facts | {"multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}


def run(stage: Stage, seconds: int, log: Path, rows: Path) -> dict[str, Any]:
    """Its verdict: "ok", "failed" or "cut" (out of time), and the last lines that it printed."""
    print(f"== {stage.name}: {stage.what} (at most {seconds} s)", flush=True)
    start = time.monotonic()
    env = os.environ | stage.env | {"GPU_CHECK_ROWS": str(rows), "GPU_CHECK_SECONDS": str(seconds - 10)}
    with log.open("w") as out:
        try:
            process = subprocess.run(
                stage.command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=seconds
            )
            verdict = "ok" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            verdict = "cut"
        except FileNotFoundError as error:
            verdict = "failed"
            out.write(f"{error.filename} was not found\n")
    last = log.read_text(errors="replace").strip().splitlines()[-25:]
    took = round(time.monotonic() - start, 1)
    print("\n".join(f"   {line}" for line in (last[-1:] if verdict == "ok" else last)))
    print(f"   {verdict}, {took} s", flush=True)
    return {"stage": stage.name, "verdict": verdict, "seconds": took, "last": last}


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds of every contender, the speed against a copy of the same bytes, and the time against the smallest
    kernel."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        here = {row["name"]: row for row in rows if row["case"] == case}
        copy, smallest = (here.get(name, {}).get("us") for name in ("copy", "the smallest kernel"))
        lines.append(case)
        for name, row in here.items():
            if "us" not in row:
                lines.append(f"   {name:<36}left out: {row['left_out']}")
                continue
            shares = f"{100 * copy / row['us']:6.0f} % of a copy" if copy else ""
            shares += f"{row['us'] / smallest:8.2f} smallest kernels" if smallest else ""
            lines.append(f"   {name:<36}{row['us']:>12.2f} us {shares}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-gpu", action="store_true", help="a rehearsal: every stage on the CPU, tiny sizes")
    parser.add_argument(
        "--only", action="append", metavar="STAGE", help="of the stages named in the output; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write results there (default: benchmarks/results/gpu.json)")
    arguments = parser.parse_args()

    facts = machine(arguments.no_gpu)
    chosen = stages(arguments.no_gpu, facts.get("capability", ""))
    if unknown := set(arguments.only or ()) - {stage.name for stage in chosen}:
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in chosen)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    path = arguments.json or (BUILD / "rehearsal.json" if arguments.no_gpu else RESULTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows_file = BUILD / "rows.jsonl"
    rows_file.unlink(missing_ok=True)

    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    end = time.monotonic() + TOTAL
    verdicts: list[dict[str, Any]] = []
    for stage in chosen:
        if arguments.only and stage.name not in arguments.only:
            continue
        seconds = min(stage.seconds, int(end - time.monotonic()))
        if seconds < 20:
            verdicts.append({"stage": stage.name, "verdict": "left out", "seconds": 0, "last": ["no time was left"]})
            continue
        verdicts.append(run(stage, seconds, BUILD / f"{stage.name}.log", rows_file))
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
        path.write_text(json.dumps({"machine": facts, "stages": verdicts, "rows": rows}, indent=1) + "\n")
        if stage.name == "build" and verdicts[-1]["verdict"] != "ok":
            break
    print(table(rows))
    print("\n".join(f"{verdict['stage']:<12}{verdict['verdict']:<10}{verdict['seconds']:>7} s" for verdict in verdicts))
    print(f"wrote {path}; logs are in {BUILD}")
    return 0 if all(verdict["verdict"] == "ok" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
