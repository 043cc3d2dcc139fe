"""What the operator should reach, each beside what it reached."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.block import CASES as BLOCKS
from benchmarks.cases import MAIN, Case
from benchmarks.contenders import CLONES, NEG
from benchmarks.results import ALL, BLOCK, ONE, WARM, Record, Results

Point = tuple[str, int]  # phase, tokens
Who = tuple[str, str]  # setting, contender

ONE_TOKEN: list[Point] = [("decode", 1)]
EIGHT: list[Point] = [("decode", 8)]
IN_CACHE: list[Point] = [("decode", 64), ("decode", 256), ("prefill", 128), ("prefill", 512)]
BEYOND: list[Point] = [("prefill", 2048), ("prefill", 8192)]  # than a core's own caches
APPLY, APPLY_IN_PLACE, EAGER, PEER = "rope::apply", "rope::apply_", "eager LLaMA", "the best peer"
NARROW = ("bf16", "fp16")
LEVELS = ("avx2", "avx512")


@dataclass(frozen=True)
class Target:
    """The time of `of` over that of `to` at each point, to stay at or under a bound for a dtype; or at least at it."""

    text: str
    points: list[Point]
    of: Who
    to: Who
    bounds: dict[str, float]
    at_least: bool = False


def each(bound: float, *dtypes: str) -> dict[str, float]:
    return dict.fromkeys(dtypes or ("bf16", "fp16", "fp32"), bound)


OP, CLONED, META = (ONE, APPLY), (ONE, CLONES), (ONE, EAGER)
IN_PLACE, NEGATED = (ONE, APPLY_IN_PLACE), (ONE, NEG)
THREADS, THREAD = (ALL, APPLY), (ALL, "rope::apply, one thread")

TARGETS = [
    Target("1 token: torch.ops, to two clones", ONE_TOKEN, OP, CLONED, {"bf16": 1.05, "fp16": 1.1, "fp32": 1.05}),
    Target("1 token: in place, to two neg_", ONE_TOKEN, IN_PLACE, NEGATED, each(1.2)),
    Target("1 token: apply_rotary_emb, to two clones", ONE_TOKEN, (ONE, "apply_rotary_emb"), CLONED, each(0.7)),
    Target("8 tokens: torch.ops, to two clones", EIGHT, OP, CLONED, {"bf16": 1.4, "fp16": 1.55, "fp32": 1.0}),
    Target("8 tokens: all threads, to one", EIGHT, THREADS, THREAD, each(1.0)),
    Target("in cache: torch.ops, to two clones", IN_CACHE, OP, CLONED, {"bf16": 1.5, "fp16": 1.9}),
    Target("64, 128 tokens: torch.ops, to two clones", IN_CACHE[::2], OP, CLONED, {"fp32": 1.15}),
    Target("in cache: in place, to two neg_", IN_CACHE, IN_PLACE, NEGATED, {"bf16": 3.0, "fp16": 3.9, "fp32": 1.15}),
    Target("beyond: in place, to two neg_", BEYOND, IN_PLACE, NEGATED, each(1.1)),
    Target("beyond, warm allocator: to two clones", BEYOND, (WARM, APPLY), (WARM, CLONES), each(0.8)),
    Target("8192 tokens, fresh pages: to two clones", BEYOND[1:], OP, CLONED, each(0.45)),
    Target("in cache: best peer, to ours", [*ONE_TOKEN, *EIGHT, *IN_CACHE], (ONE, PEER), OP, each(1.3, *NARROW), True),
    Target("beyond, warm allocator: best peer", BEYOND, (WARM, PEER), (WARM, APPLY), each(1.1, *NARROW), True),
    Target("1 token: eager LLaMA, to ours", ONE_TOKEN, META, OP, {"bf16": 7, "fp32": 4.5}, True),
    Target("more: eager LLaMA, to ours", [*EIGHT, *IN_CACHE, *BEYOND], META, OP, {"bf16": 4.5}, True),
    Target("64 tokens: eager LLaMA, to ours", IN_CACHE[:1], META, OP, {"fp32": 1.6}, True),
    Target("512 tokens: all threads, to one", IN_CACHE[3:], THREADS, THREAD, each(0.65)),
]


def time_of(results: Results, who: Who, point: Point, dtype: str) -> Record | None:
    setting, contender = who
    if contender != PEER:
        return results.find(setting, contender, *point, dtype, MAIN)
    case = Case(*point, MAIN, dtype)
    peers = [r for r in results.records if (r.setting, r.case, r.kind, r.in_place) == (setting, case, "peer", False)]
    return min(peers, key=lambda r: r.time.median, default=None)


Ratios = dict[str, tuple[float, float]]  # label -> of medians, of 10th percentiles


def ratio(of: Record | None, to: Record | None) -> tuple[float, float] | None:
    """As it will be shown and judged, to two digits."""
    return (round(of.time.median / to.time.median, 2), round(of.time.p10 / to.time.p10, 2)) if of and to else None


def ratios(results: Results, target: Target, dtype: str) -> Ratios:
    found = {}
    for point in target.points:
        of, to = time_of(results, target.of, point, dtype), time_of(results, target.to, point, dtype)
        if value := ratio(of, to):
            found[f"{point[1]} {of.contender}" if of and of.kind == "peer" else str(point[1])] = value
    return found


def levels(results: Results, points: list[Point], dtype: str) -> Ratios:
    """AVX2 over AVX-512, each in a process of its own and so relative to its own two clones."""
    wide = results.machine["rope_ext"]["cpu_isa"]
    found = {}
    for point in points if wide == LEVELS[1] else ():
        values = [
            ratio(time_of(results, (setting, APPLY), point, dtype), time_of(results, (setting, CLONES), point, dtype))
            for setting in (LEVELS[0], ONE)
        ]
        if values[0] and values[1]:
            found[str(point[1])] = (round(values[0][0] / values[1][0], 2), round(values[0][1] / values[1][1], 2))
    return found


def blocks(results: Results) -> dict[str, Ratios]:
    """The compiled block with the better functional form of the operator, over the best formula that Inductor fuses."""
    found: dict[str, Ratios] = {}
    for case in BLOCKS:
        here = {r.contender: r for r in results.records if (r.setting, r.case) == (BLOCK, case)}
        op = [r for name, r in here.items() if name.startswith("rope::")]
        formula = [r for name, r in here.items() if name.endswith("formula")]
        if op and formula:
            best = ratio(min(op, key=lambda r: r.time.median), min(formula, key=lambda r: r.time.median))
            assert best is not None
            found.setdefault(case.dtype, {})[f"{case.heads.q} heads, {case.phase.removeprefix('block ')}"] = best
    return found


def show(results: Results, out: Console) -> None:
    table = Table(title="targets, ratios of medians (of 10th percentiles)", title_justify="left")
    for name in ("", "dtype", "target", "measured", ""):
        table.add_column(name)

    def line(text: str, dtype: str, bound: float, at_least: bool, found: Ratios) -> None:
        if not found:
            return
        met = [m >= bound if at_least else m <= bound for m, _ in found.values()]
        quiet = [p >= bound if at_least else p <= bound for _, p in found.values()]
        verdict = (
            "[green]met[/]" if all(met) else "[yellow]10th percentile only[/]" if all(quiet) else "[red]not met[/]"
        )
        measured = "  ".join(f"{label}: {m:.2f} ({p:.2f})" for label, (m, p) in found.items())
        table.add_row(text, dtype, f"{'>=' if at_least else '<='} {bound:g}", measured, verdict)

    for target in TARGETS:
        for dtype, bound in target.bounds.items():
            line(target.text, dtype, bound, target.at_least, ratios(results, target, dtype))
    for dtype in each(0):
        line("in cache: AVX2 to AVX-512", dtype, 1.6, False, levels(results, IN_CACHE, dtype))
        line("beyond: AVX2 to AVX-512", dtype, 1.05, False, levels(results, BEYOND, dtype))
    for dtype, found in blocks(results).items():
        line("compiled block: best operator to best formula", dtype, 1.0, False, found)

    promised = [r for r in results.records if r.bits is not None]
    if promised:
        equal, settings = sum(bool(r.bits) for r in promised), len({r.setting for r in promised})
        verdict = "[green]met[/]" if equal == len(promised) else "[red]not met[/]"
        text = f"{equal} of {len(promised)} results, {settings} settings"
        table.add_row("bits equal to the reference", "all", "all", text, verdict)
    out.print(table)
