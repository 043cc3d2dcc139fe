"""Measures the operator on the CPU against its floors and against what users of torch have today.

    python benchmarks/bench.py            # everything, under ten minutes; writes benchmarks/results/
    python benchmarks/bench.py --quick    # about a minute; writes only where --json says
    python benchmarks/bench.py --from benchmarks/results/cpu.json    # tables and plots of an earlier run

How times are taken is said in timing.py. Needs rich and matplotlib, and a C++ compiler for the floors; takes in
onnxruntime (with onnx), openvino, jax, vLLM and SGLang where they can be imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # appended, so that an installed rope_ext goes before the source tree

try:
    import rope_ext
    from benchmarks import contenders, plots, results, tables, targets, worker
    from benchmarks.cases import Case, Heads
    from benchmarks.results import Record, Results
    from benchmarks.settings import Setting, settings
    from benchmarks.timing import summarise
except ImportError as error:
    sys.exit(f"{error}: the benchmark needs rope_ext, built, and pip install rich matplotlib numpy ninja")

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"


def in_its_own_process(setting: Setting, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, __file__, *options, "--worker", setting.name, "--json", str(out)]
        subprocess.run(command, env=os.environ | setting.env, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def record(rows: list[dict[str, Any]]) -> Record:
    """Of the rows of one contender and case, one from each process that measured it."""
    row = rows[0]
    case = Case(**(row["case"] | {"heads": Heads(**row["case"]["heads"])}))
    samples = [sample for each in rows for sample in each["samples"]]
    bits = None if row["bits"] is None else all(each["bits"] for each in rows)
    facts = (row["setting"], case, row["contender"], row["kind"], row["in_place"], bits)
    return Record(*facts, summarise(samples))


def measure(chosen: list[Setting], options: list[str], repeat: int) -> Results:
    machine = results.machine()
    contenders.floors_library()  # compiled once, here, for all processes
    by_key: dict[str, list[dict[str, Any]]] = {}
    left_out = []
    for _ in range(repeat):
        for setting in chosen:
            found = in_its_own_process(setting, options)
            left_out += found["left_out"]
            for row in found["rows"]:
                by_key.setdefault(json.dumps([row["setting"], row["case"], row["contender"]]), []).append(row)
    machine["load_after"] = round(os.getloadavg()[0], 2)
    reasons = [list(reason) for reason in results.unique(tuple(reason) for reason in left_out)]
    return Results(machine, [record(rows) for rows in by_key.values()], reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a subset in about a minute")
    parser.add_argument(
        "--only", action="append", metavar="SETTING", help="of the settings named in the output; repeatable"
    )
    parser.add_argument("--repeat", type=int, default=1, help="fresh processes per setting, whose samples are pooled")
    parser.add_argument(
        "--json", type=Path, help="write results there, and plots beside (default of a full run: results/)"
    )
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing, read this file")
    parser.add_argument("--worker", metavar="SETTING", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    available = settings(arguments.quick)
    if arguments.worker:
        arguments.json.write_text(json.dumps(worker.run(available[arguments.worker])))
        return
    info = rope_ext.build_info()
    for level in info["cpu_isa_built"][info["cpu_isa_built"].index(info["cpu_isa"]) :]:
        del available[level]  # it is the one that all other settings use, or more than the machine has
    if unknown := set(arguments.only or ()) - set(available):
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {', '.join(available)}")

    if arguments.source:
        found = results.read(arguments.source)
    else:
        chosen = [setting for name, setting in available.items() if not arguments.only or name in arguments.only]
        found = measure(chosen, ["--quick"] if arguments.quick else [], arguments.repeat)
    out = tables.console()
    tables.show(found, out)
    targets.show(found, out)
    whole = not arguments.quick and not arguments.only and not arguments.source
    path = arguments.json or arguments.source or (RESULTS if whole else None)
    if path:
        if not arguments.source:
            found.write(path)
        path.with_suffix(".txt").write_text("\n".join(line.rstrip() for line in out.export_text().splitlines()) + "\n")
        plots.draw(found, path)
        print(f"wrote {path}, the same as text, and plots beside it")


if __name__ == "__main__":
    main()
