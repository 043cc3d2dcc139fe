"""Pictures of the results: time over the floor for each contender, and growth with tokens and with heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import DTYPES, GROWING, MAIN
from benchmarks.contenders import CLONES, NEG
from benchmarks.results import ONE, Record, Results

# Warm: ours. Cold: what users have. Grey: others and floors.
STYLES: dict[str, dict[str, Any]] = {
    "rope::apply": {"color": "#c1440e", "linewidth": 2.2, "marker": "o"},
    "apply_rotary_emb": {"color": "#e8963e", "marker": "s"},
    "rope::apply_": {"color": "#c1440e", "linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    "eager LLaMA": {"color": "#1f4e79", "marker": "^"},
    "eager HF": {"color": "#5b8db8", "marker": "v"},
    "compiled LLaMA": {"color": "#1f4e79", "linestyle": ":", "marker": "^", "markerfacecolor": "white"},
    "compiled HF": {"color": "#5b8db8", "linestyle": ":", "marker": "v", "markerfacecolor": "white"},
    "onnxruntime": {"color": "#6a7f5a", "marker": "D"},
    "openvino": {"color": "#8a6fa8", "marker": "P"},
    "jax": {"color": "#9a9a9a", "marker": "X"},
    "vLLM": {"color": "#3c7a5e", "marker": "*"},
    "SGLang": {"color": "#a34f7e", "marker": "h"},
    CLONES: {"color": "black", "linewidth": 1, "label": CLONES},
    NEG: {"color": "black", "linewidth": 1, "linestyle": "--"},
}
RC: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "lines.markersize": 4.5, "lines.linewidth": 1.3, "svg.fonttype": "path", "svg.hashsalt": "rope",
}  # fmt: skip


def line(axes: Axes, points: list[tuple[float, float]], name: str) -> None:
    if points:
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, **({"label": name} | STYLES[name]))


def of(results: Results, name: str, dtype: str) -> list[Record]:
    wanted = (ONE, name, MAIN, dtype)
    return [r for r in results.records if (r.setting, r.contender, r.case.heads, r.case.dtype) == wanted]


def ticks(axes: Axes, values: list[int]) -> None:
    axes.set_xticks(values, [f"{n // 1024}k" if n >= 1024 else str(n) for n in values])
    axes.minorticks_off()


SCALE = [0.2, 0.5, 1, 2, 5, 10, 20, 50]
TOKENS = [1, 8, 64, 512, 2048, 8192, 32768]


def over_floor(results: Results) -> Figure:
    dtypes = [dtype for dtype in DTYPES if of(results, "rope::apply", dtype)]
    figure, panels = plt.subplots(1, len(dtypes), figsize=(4.2 * len(dtypes), 4.4), sharey=True, squeeze=False)
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        for name in STYLES:
            pairs = [(r, results.floor_of(r)) for r in of(results, name, dtype)]
            line(axes, [(r.case.tokens, r.time.median / f.time.median) for r, f in pairs if f and f is not r], name)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xscale="log", yscale="log", title=dtype, xlabel="tokens")
        ticks(axes, TOKENS)
        axes.set_yticks(SCALE, [f"{n:g}" for n in SCALE])
        axes.grid(axis="y", alpha=0.25)
    panels[0][0].set_ylabel("time, in copies of q and k")
    panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.suptitle(f"Rotary embedding of q and k, {MAIN}, one thread of {results.machine['cpu']}", x=0.01, ha="left")
    figure.text(
        0.01, 0.005, "1 is two clones, or two neg_ for the in-place rope::apply_; medians", fontsize=8, alpha=0.7
    )
    return figure


def growth(results: Results) -> Figure:
    figure, (tokens, heads) = plt.subplots(1, 2, figsize=(9.6, 4.2))
    for name in STYLES:
        line(tokens, [(r.case.tokens, r.time.median) for r in of(results, name, "bf16")], name)
        rows = [r for r in results.records if (r.setting, r.contender, r.case.dtype) == (ONE, name, "bf16")]
        alike = [r for r in rows if r.case.phase == "decode" and r.case.tokens == 64 and r.case.heads in GROWING]
        line(heads, [(r.case.heads.q + r.case.heads.k, r.time.median) for r in alike], name)
    tokens.set(xscale="log", yscale="log", title=f"with tokens, {MAIN}, bf16", xlabel="tokens", ylabel="microseconds")
    ticks(tokens, TOKENS)
    heads.set(xscale="log", yscale="log", title="with heads, 64 tokens, bf16", xlabel="heads of q and k")
    ticks(heads, [h.q + h.k for h in GROWING])
    for axes in (tokens, heads):
        axes.grid(alpha=0.2)
    heads.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def draw(results: Results, path: Path) -> None:
    """Writes SVGs beside the JSON file of that path."""
    if not of(results, "rope::apply", "bf16"):
        return
    with plt.rc_context(RC):
        for name, figure in (("over-floor", over_floor(results)), ("growth", growth(results))):
            figure.tight_layout()
            file = path.with_name(f"{path.stem}-{name}.svg")
            figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
