"""Every rotary architecture of transformers as a tiny random model, run with its own rotary functions and rope_ext's.

    python -m benchmarks.architectures [--only llama,qwen2_vl] [--json FILE]

For every model: float32 outputs before and after ``patch``, which must agree within 1e-5 of their scale; that no rotary
function that the model called before still runs in its old form; that the outputs would show a missing rotation; greedy
generation with a cache from a left-padded batch; every rotation of a bfloat16 run against float64; and after
``unpatch`` the first outputs to the last bit. An architecture is a folder of transformers' models; it passes if all its
models that rotate and run pass. Exits with 1 if less than 95 % of those that run do. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

from benchmarks.patched_model import Tower, run
from benchmarks.tiny_models import architectures

REQUIRED = 0.95  # of the architectures that run
TIME_LIMIT = 120  # seconds for one architecture, all its models
ROW = "{:24} {:44} {:>8} {:>8} {:>6}  {}"


def _child(architecture: str, send: Callable[[Tower], None]) -> None:
    for tower in run(architecture):
        send(tower)


def isolated(architecture: str) -> list[Tower]:
    """``run`` in a process of its own: one that dies or hangs costs one architecture, and memory is given back."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(architecture, sender.send))
    process.start()
    sender.close()
    found: list[Tower] = []
    deadline = time.monotonic() + TIME_LIMIT
    try:
        while receiver.poll(max(deadline - time.monotonic(), 0)):
            found.append(receiver.recv())
        found.append(Tower(architecture, "failed", f"no end after {TIME_LIMIT} s"))
        process.kill()
        process.join()
    except EOFError:
        process.join()
        if process.exitcode:
            found.append(Tower(architecture, "failed", f"died with {process.exitcode}"))
    return found


def summary(results: dict[str, list[Tower]]) -> tuple[str, float]:
    """The last lines, and which part of the architectures that run passes."""
    ran, passed, equal, lines = 0, 0, 0, []
    ratios = [t.bf16 for towers in results.values() for t in towers if t.outcome in ("equal", "close") and t.bf16 > 0]
    for name, found in results.items():
        outcomes = {t.outcome for t in found} - {"not rotary", "not run"}
        ran += bool(outcomes)
        passed += bool(outcomes) and outcomes <= {"equal", "close"}
        equal += outcomes == {"equal"}
        rest = (t for t in found if t.outcome in ("failed", "kept", "not run"))
        lines += [f"  {name}: {t.name} {t.outcome}: {t.reason}" for t in rest]
        if {t.outcome for t in found} == {"not rotary"}:
            lines.append(f"  {name}: no model of it called a rotary function")
    share = passed / ran if ran else 0.0
    generated = sum(t.generated for found in results.values() for t in found)
    text = [
        f"transformers {transformers.__version__}, torch {torch.__version__}: {len(results)} architectures, "
        f"{ran} built and run, {passed} patched with matching outputs ({share:.1%}), {equal} of them to the last bit",
        f"bfloat16: the patched model's error over the original's, geometric mean of {len(ratios)} models: "
        f"{math.exp(statistics.fmean(math.log(r) for r in ratios)):.3f}"
        if ratios
        else "bfloat16: no model",
        f"text generated from a left-padded batch, with a cache: {generated} models",
        *(["the rest:", *lines] if lines else []),
    ]
    return "\n".join(text), share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of architectures, with commas between")
    parser.add_argument("--json", type=Path, help="a file for all results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # models this small gain nothing, and a process that has threads cannot be forked
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    wanted = options.only.split(",") if options.only else architectures()
    if unknown := set(wanted) - set(architectures()):
        parser.error(f"not among the rotary architectures: {', '.join(sorted(unknown))}")

    print(ROW.format("architecture", "model", "outcome", "apart", "bf16", ""))
    results: dict[str, list[Tower]] = {}
    for name in wanted:
        results[name] = isolated(name)
        for t in results[name]:
            ran = t.outcome in ("equal", "close")
            numbers = (f"{t.difference:.0e}", f"{t.bf16:.2f}") if ran else ("", "")
            print(ROW.format(name, t.name, t.outcome, *numbers, t.reason).rstrip(), flush=True)
    text, share = summary(results)
    print(text)
    if options.json:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        rows = {name: [t._asdict() for t in found] for name, found in results.items()}
        options.json.write_text(json.dumps({**versions, "passed": share, "architectures": rows}, indent=1) + "\n")
    return int(share < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
