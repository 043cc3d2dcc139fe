"""Counts instructions of the four main kernels per 16 bytes written, at every instruction set level.

``python benchmarks/instructions.py`` prints them, with ``--check`` it compares them with instructions.json and fails
where a count has grown by more than 5 %, with ``--update`` it writes them there. A kernel that became slower hides in
the noise of a clock; it does not hide here. Two counts:

* ``loop``: instructions of the inner loop over heads, read in the disassembly.
* ``call``: instructions executed for a token with 32 + 8 heads of 128 features, its table row included, counted by
  ``valgrind --tool=callgrind``, which knows no AVX-512.

Counts belong to one compiler, so the file holds a set for each that was recorded. Needs g++ (or CXX) and objdump, and
valgrind for ``call``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("instructions.json")
LEVELS = ("default", "avx2", "avx512")
KERNELS = (("bf16", "neighbours"), ("bf16", "halves"), ("fp32", "neighbours"), ("fp32", "halves"))
TOLERANCE = 1.05

Counts = dict[str, dict[str, float]]  # "avx2 bf16 halves" -> {"loop": 9.8, "call": 10.6}


def missing_tools() -> list[str]:
    return [tool for tool in (cxx(), "objdump", "valgrind") if shutil.which(tool) is None]


def cxx() -> str:
    return os.environ.get("CXX", "g++")


def compiler() -> str:
    """Such as "g++ (Debian 12.2.0-14+deb12u1) 12.2.0"."""
    return run(cxx(), "--version").splitlines()[0]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(str(word) for word in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def flags() -> list[str]:
    """Those of setup.py, which cannot be imported without building."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CXX":
            return [*ast.literal_eval(node.value), "-std=c++20", "-fPIC"]
    raise RuntimeError("setup.py has no list CXX of compiler flags")


def compile_kernel(level: str, folder: Path, *extra: str) -> Path:
    target = folder / f"rotate_{level}.o"
    run(cxx(), *flags(), *extra, "-c", ROOT / "csrc" / "cpu" / f"rotate_{level}.cpp", "-o", target)
    return target


def compile_kernels(folder: Path) -> dict[str, Path]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(LEVELS, pool.map(lambda level: compile_kernel(level, folder), LEVELS), strict=True))


# ---- reading machine code

Instruction = tuple[int, str]  # address, text


def functions(binary: Path) -> dict[str, list[Instruction]]:
    listing = run("objdump", "-d", "-C", "--no-show-raw-insn", binary)
    found = {}
    for name, body in re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)+)", listing, re.MULTILINE):
        lines = re.findall(r"^\s*([0-9a-f]+):\t(.+?)\s*$", body, re.MULTILINE)
        found[name] = [(int(address, 16), text) for address, text in lines]
    return found


def fused(binary: Path) -> list[str]:
    """Functions that hold a fused multiply-add, which rounds once where the definition rounds twice."""
    fma = re.compile(r"^v?fn?m(add|sub)|^fml[as]\b")
    return [name for name, body in functions(binary).items() if any(fma.match(text) for _, text in body)]


def innermost_loops(body: list[Instruction]) -> list[list[str]]:
    at = {address: i for i, (address, _) in enumerate(body)}
    spans = set()
    for i, (_, text) in enumerate(body):
        jump = re.match(r"j\w+\s+([0-9a-f]+)\b", text)
        start = at.get(int(jump[1], 16)) if jump else None
        if start is not None and start <= i:
            spans.add((start, i))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    padding = ("nop", "data16", "cs nop", "xchg")
    return [[text for _, text in body[a : b + 1] if not text.startswith(padding)] for a, b in inner]


def bytes_stored(loop: list[str]) -> int:
    """By whole vector registers: the last operand is memory, the one before names the width."""
    stores = (re.match(r"v?mov\S*\s+%([xyz])mm\d+,[^%]*\(", text) for text in loop)
    return sum({"x": 16, "y": 32, "z": 64}[store[1]] for store in stores if store)


def loop_count(binary: Path, dtype: str, pairing: str) -> float:
    """Of the loop that does most at once: whole heads of 128 features, with the table row in registers."""
    element = {"bf16": r"\S*BFloat16", "fp32": "float"}[dtype]
    kernel = re.compile(rf"rotate_rows<{element}, {'true' if pairing == 'neighbours' else 'false'}, float>\(")
    names = [
        (name, body)
        for name, body in functions(binary).items()
        if kernel.search(name.replace("(anonymous namespace)::", ""))
    ]
    if len(names) != 1:
        raise RuntimeError(f"{binary.name}: {len(names)} functions are called {kernel.pattern}")
    loops = [loop for loop in innermost_loops(names[0][1]) if any("mulps" in text for text in loop)]
    best = max(loops, key=bytes_stored)
    return len(best) * 16 / bytes_stored(best)


# ---- watching a run


def executed(driver: Path, folder: Path, level: str, dtype: str, pairing: str, tokens: int) -> int:
    out = folder / f"callgrind.{level}.{dtype}.{pairing}.{tokens}"
    run("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", driver, level, dtype, pairing, str(tokens))
    return int(re.findall(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)[0])


def call_count(driver: Path, folder: Path, level: str, dtype: str, pairing: str) -> float:
    """Two runs of different length: what starting a program takes cancels out."""
    few, many = 8, 72
    more = executed(driver, folder, level, dtype, pairing, many) - executed(driver, folder, level, dtype, pairing, few)
    written = (many - few) * (32 + 8) * 128 * {"bf16": 2, "fp32": 4}[dtype]
    return more * 16 / written


def count(objects: dict[str, Path], folder: Path) -> Counts:
    """Of every level and kernel; objects as from compile_kernels."""
    driver = folder / "instructions"
    run(cxx(), *flags(), ROOT / "benchmarks" / "instructions.cpp", *objects.values(), "-o", driver)
    counts: Counts = {}
    for level in LEVELS:
        for dtype, pairing in KERNELS:
            row = {"loop": round(loop_count(objects[level], dtype, pairing), 2)}
            if level != "avx512":
                row["call"] = round(call_count(driver, folder, level, dtype, pairing), 2)
            counts[f"{level} {dtype} {pairing}"] = row
    return counts


def recorded() -> dict[str, Counts]:
    """By compiler."""
    return json.loads(BASELINE.read_text()) if BASELINE.exists() else {}


def regressions(counts: Counts, before: Counts) -> list[str]:
    if counts.keys() != before.keys():
        return [f"kernels recorded and found differ: {sorted(counts.keys() ^ before.keys())}"]
    return [
        f"{kernel}: {kind} {before[kernel][kind]} -> {found} instructions per 16 bytes"
        for kernel, row in counts.items()
        for kind, found in row.items()
        if found > before[kernel][kind] * TOLERANCE
    ]


def write(counts: Counts) -> None:
    sets = recorded() | {compiler(): counts}
    blocks = []
    for name, rows in sorted(sets.items()):
        lines = ",\n".join(f"  {json.dumps(kernel)}: {json.dumps(row)}" for kernel, row in rows.items())
        blocks.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    BASELINE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def show(counts: Counts, before: Counts | None) -> None:
    print(f"instructions per 16 bytes written, {compiler()}")
    print(f"{'kernel':26}{'loop':>8}{'call':>8}{'recorded':>20}")
    for kernel, row in counts.items():
        call = f"{row['call']:.2f}" if "call" in row else "-"
        was = " / ".join(f"{value:.2f}" for value in (before or {}).get(kernel, {}).values())
        print(f"{kernel:26}{row['loop']:8.2f}{call:>8}{was or '-':>20}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a count is 5 %% above the recorded one")
    parser.add_argument("--update", action="store_true", help="record these counts for this compiler")
    arguments = parser.parse_args()
    if missing_tools():
        return print(f"not counted: there is no {' and no '.join(missing_tools())}", file=sys.stderr) or 1

    with tempfile.TemporaryDirectory() as name:
        counts = count(compile_kernels(Path(name)), Path(name))
    before = recorded().get(compiler())
    show(counts, before)
    if arguments.update:
        write(counts)
    elif arguments.check and before is None:
        return print(f"{BASELINE.name} has no counts for {compiler()}: record them with --update", file=sys.stderr) or 1
    elif arguments.check and before and (worse := regressions(counts, before)):
        return print("\n".join(worse), file=sys.stderr) or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
