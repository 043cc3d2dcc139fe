"""Results on the terminal."""

from __future__ import annotations

import shutil
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.cases import MAIN
from benchmarks.results import ONE, Record, Results, unique


def console() -> Console:
    """As wide as the terminal, or as the tables where there is none. Keeps what it prints, for a file."""
    return Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 150, record=True)


def size(nbytes: float) -> str:
    for unit, step in (("GB", 1 << 30), ("MB", 1 << 20)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes / 1024:.3g} KB"


def duration(us: float) -> str:
    return f"{us / 1000:.4g} ms" if us >= 10_000 else f"{us:.3g} us" if us < 1000 else f"{us:.0f} us"


def cell(record: Record | None, floor: Record | None) -> str:
    """The median, its ratio to the floor and, in percent, half the way from the 10th to the 90th percentile."""
    if record is None:
        return ""
    t = record.time
    ratio = f"{t.median / floor.time.median:.2f}x" if floor else ""
    return f"{duration(t.median)}\n[bold]{ratio}[/] [dim]±{50 * (t.p90 - t.p10) / t.median:.0f}%[/]"


def column(record: Record) -> str:
    return f"{record.case.phase.removeprefix('block ')}\n{record.case.tokens}"


def times(results: Results, out: Console) -> None:
    for setting, heads, dtype in unique((r.setting, r.case.heads, r.case.dtype) for r in results.records):
        rows = [r for r in results.records if (r.setting, r.case.heads, r.case.dtype) == (setting, heads, dtype)]
        columns = unique(column(r) for r in rows)
        table = Table(title=f"{setting}: {heads}, {dtype}", title_justify="left")
        table.add_column(
            "x: of two clones, or of two neg_ in place" if rows[0].kind != "block" else "x: of no rotation"
        )
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        kind = rows[0].kind
        for name in unique(r.contender for r in rows):
            of_name = {column(r): r for r in rows if r.contender == name}
            first = next(iter(of_name.values()))
            if first.kind != kind:
                table.add_section()
                kind = first.kind
            cells = [cell(of_name.get(c), results.floor_of(of_name[c]) if c in of_name else None) for c in columns]
            table.add_row(f"{name} (in place)" if first.in_place else name, *cells)
        out.print(table)


def bandwidth(results: Results, out: Console) -> None:
    """How near one thread comes to a copy of the same bytes between buffers that exist already."""
    table = Table(title=f"bytes moved, one thread, {MAIN}", title_justify="left")
    for name in ("", "read + written", "lives in", "copy GB/s", "rope::apply", "of a copy", "rope::apply_", "two neg_"):
        table.add_column(name, justify="right")
    for record in results.records:
        if (record.setting, record.contender, record.case.heads) != (ONE, "rope::apply", MAIN):
            continue
        case = record.case
        at = (case.phase, case.tokens, case.dtype, case.heads)
        copies = [results.find(ONE, f"{kind}, warm buffers", *at) for kind in ("memcpy", "streaming copy")]
        others = [results.find(ONE, name, *at) for name in ("rope::apply_", "two neg_")]
        if not all(copies + others):
            continue
        copy = min(c.time.median for c in copies if c)
        moved = 2 * case.bytes
        home = next((name for name, held in results.machine["caches"].items() if moved <= held), "memory")
        speeds = [f"{moved / t.time.median / 1000:.1f}" for t in others if t]
        table.add_row(
            f"{case.phase} {case.tokens}, {case.dtype}", size(moved), home, f"{moved / copy / 1000:.1f}",
            f"{moved / record.time.median / 1000:.1f}", f"{copy / record.time.median:.0%}", *speeds,
        )  # fmt: skip
    if table.row_count:
        out.print(table)


def show(results: Results, out: Console) -> None:
    m = results.machine
    sizes = ", ".join(f"{name} {size(held)}" for name, held in m["caches"].items())
    info = m["rope_ext"]
    built = f"torch {m['torch']}, rope_ext {info['version']} at level {info['cpu_isa']}"
    out.print(
        f"{m['cpu']}, {m['cores']} cores, {sizes}; {built}; load {m['load_before']} before, {m['load_after']} after"
    )
    out.print("x: ratio of medians to the floor; ±: half the way from the 10th percentile to the 90th")
    times(results, out)
    bandwidth(results, out)
    for name, reason in results.left_out:
        out.print(f"[dim]left out: {name}: {reason}[/]")
