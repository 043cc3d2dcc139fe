"""Figures of the kernels' machine code, and the baseline that they must not fall behind: sass_baseline.json.

``python tests/cuda/sass.py`` prints them; with ``--write`` it renews the baseline, which belongs to one nvcc release.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

from kernel_tools import FLAGS, SOURCE, leave_out, nvcc_release, tool

BASELINE = Path(__file__).with_name("sass_baseline.json")
ARCHS = ("80", "90", "100")
FIGURES = ("registers", "instructions", "per_16_bytes", "wide_loads", "narrow_loads", "wide_stores", "narrow_stores")
FORBIDDEN = ("local", "stack_bytes", "spill_bytes", "call", "mufu")
FORMS = ("complex_f32", "split_f32", "split_x")
TYPES = {"f": "f32", "d": "f64", "6__half": "f16", "13__nv_bfloat16": "bf16"}


def readable(kernel: str) -> str:
    """Such as "rotate_vectors bf16 complex_f32 halves 4", or "rotate_any f16 in f64 1"."""
    vectors = re.search(r"rotate_vectorsI(.+?)LNS_9TableFormE(\d)ELb(\d)ELi(\d)E", kernel)
    if vectors:
        dtype, form, neighbours, heads = vectors.groups()
        pairing = "neighbours" if neighbours == "1" else "halves"
        return f"rotate_vectors {TYPES[dtype]} {FORMS[int(form)]} {pairing} {heads}"
    dtype, inside, elements = re.search(r"rotate_anyI(6__half|13__nv_bfloat16|[fd])([fd])Li(\d)E", kernel).groups()
    return f"rotate_any {TYPES[dtype]} in {TYPES[inside]} {elements}"


def figures(arch: str) -> dict[str, dict[str, float]]:
    """Of every kernel, by its readable name."""
    sasstab = tool("sasstab")
    nvdisasm = sasstab.find_nvdisasm()
    if nvdisasm is None:
        leave_out("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        cubin, said = sasstab.compile_cubin(str(SOURCE), arch, FLAGS, folder)
        kernels, _ = sasstab.parse_sass(sasstab.run([nvdisasm, "-c", cubin])[0])
        resources, spills = sasstab.cubin_resources(cubin), sasstab.parse_ptxas(said)
        rows = {}
        for name, (code, loops, targets) in kernels.items():
            facts = resources.get(name, {}) | spills.get(name, {})
            row = rows[readable(name)] = sasstab.figures(code, loops, targets, facts, int(arch), 256)
            # for sm_8x, ptxas writes the exit of some loops as a CALL to a label of the kernel itself
            row["call"] -= sum("CALL.REL" in instruction and "`(.L_" in instruction for instruction in code)
        return rows


def write() -> None:
    lines = []
    for arch in ARCHS:
        rows = [
            f"  {json.dumps(name)}: {json.dumps([row[key] for key in FIGURES])}"
            for name, row in sorted(figures(arch).items())
        ]
        lines.append(f' "sm_{arch}": {{\n' + ",\n".join(rows) + "\n }")
    head = f'{{\n "nvcc": {json.dumps(nvcc_release())},\n "figures": {json.dumps(FIGURES)},\n'
    BASELINE.write_text(head + ",\n".join(lines) + "\n}\n")


def main() -> None:
    if "--write" in sys.argv:
        return write()
    for arch in ARCHS:
        print(f"sm_{arch}".ljust(44), *(key.rjust(14) for key in FIGURES))
        for name, row in sorted(figures(arch).items()):
            print(name.ljust(44), *(str(row[key]).rjust(14) for key in FIGURES))


if __name__ == "__main__":
    main()
