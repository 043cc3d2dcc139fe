"""How far the two table recipes are from the truth: draws docs/accuracy.svg and prints the table of docs/numerics.md.

    python benchmarks/accuracy.py

Nothing is timed and nothing is random: the same torch gives the same picture. The truth is mpmath's, with 30 digits.
The whole table of 2^20 rows is made twice, which takes 2 GB. Needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import mpmath
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # appended, so that an installed rope_ext goes before the source tree

from rope_ext import precompute_freqs_cis  # noqa: E402

DIM, THETA = 128, 10000.0
POSITIONS = [2**n for n in range(21)]
QUOTED = [2**n for n in (6, 10, 12, 15, 17, 20)]  # those in the table of docs/numerics.md
WINDOW = 16  # positions that a figure is the worst of: a single one may be lucky


def true_rows(positions: Sequence[int]) -> Tensor:
    """Rows of the table with 30 digits, rounded once to complex128: (positions, DIM/2)."""
    with mpmath.workdps(30):
        inv_freq = [mpmath.mpf(THETA) ** (mpmath.mpf(-2 * i) / DIM) for i in range(DIM // 2)]
        rows = [[complex(mpmath.expj(position * w)) for w in inv_freq] for position in positions]
    return torch.tensor(rows, dtype=torch.complex128)


def errors(positions: Sequence[int], *, exact: bool) -> list[float]:
    """For each position the largest error of a cosine or sine of its row and of those just before it."""
    table = precompute_freqs_cis(DIM, max(positions) + 1, THETA, exact=exact)
    result = []
    for position in positions:
        window = range(max(position - WINDOW + 1, 0), position + 1)
        difference = table[window.start : window.stop].to(torch.complex128) - true_rows(window)
        result.append(torch.view_as_real(difference).abs().max().item())
    return result


def table_row(position: int, meta: float, exact: float) -> str:
    return f"| {position} | {meta:.1e} | {exact:.1e} |"


def draw(meta: list[float], exact: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from benchmarks.plots import RC

    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(7.2, 3.8))
        axes.plot(POSITIONS, meta, color="#1f4e79", marker="^", label="float32, as Meta and transformers do")
        axes.plot(POSITIONS, exact, color="#c1440e", marker="o", label="exact=True: float64, rounded once")
        for height, name in ((2.0**-9, "half a unit in the last place of bfloat16"), (2.0**-12, "of float16")):
            axes.axhline(height, color="black", linewidth=0.8, linestyle=":")
            axes.text(1, height * 1.15, name, fontsize=8, alpha=0.7)
        axes.set(xscale="log", yscale="log", xlabel="position", ylabel="largest error of a factor", ylim=(1e-8, 1))
        axes.set_xscale("log", base=2)
        axes.set_xticks([2**n for n in (0, 5, 10, 12, 15, 17, 20)], ["1", "32", "1k", "4k", "32k", "128k", "1M"])
        axes.minorticks_off()
        axes.grid(alpha=0.2)
        axes.set_title(f"Error of the table, head_dim {DIM}, theta {THETA:g}")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.12), frameon=False)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    meta, exact = errors(POSITIONS, exact=False), errors(POSITIONS, exact=True)
    print("| position | float32 | exact=True |\n| --- | --- | --- |")
    for position, *row in zip(POSITIONS, meta, exact, strict=True):
        if position in QUOTED:
            print(table_row(position, *row))
    draw(meta, exact, ROOT / "docs" / "accuracy.svg")


if __name__ == "__main__":
    main()
