"""What was measured, how it is looked up, and where it is kept."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import rope_ext
from benchmarks.cases import Case, Heads
from benchmarks.contenders import CLONES, NEG
from benchmarks.timing import Summary

# Each setting is a process of its own, for what a process reads once: environment, malloc, instruction set.
ONE, ALL, WARM, BLOCK = "one thread", "all threads", "warm allocator", "compiled block"


@dataclass(frozen=True)
class Record:
    setting: str
    case: Case
    contender: str
    kind: str
    in_place: bool
    bits: bool | None  # equal to the reference; None: not promised
    time: Summary

    @property
    def floor(self) -> str:
        return "no rotation" if self.kind == "block" else NEG if self.in_place else CLONES


@dataclass(frozen=True)
class Results:
    machine: dict[str, Any]
    records: list[Record]
    left_out: list[list[str]]  # contender, why

    def find(self, setting: str, contender: str, phase: str, tokens: int, dtype: str, heads: Heads) -> Record | None:
        wanted = (setting, contender, Case(phase, tokens, heads, dtype))
        return next((r for r in self.records if (r.setting, r.contender, r.case) == wanted), None)

    def floor_of(self, record: Record) -> Record | None:
        c = record.case
        return self.find(record.setting, record.floor, c.phase, c.tokens, c.dtype, c.heads)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join("  " + json.dumps(packed(record)) for record in self.records)
        head = f'"machine": {json.dumps(self.machine)},\n "left_out": {json.dumps(self.left_out)}'
        path.write_text(f'{{\n {head},\n "columns": {json.dumps(COLUMNS)},\n "records": [\n{rows}\n ]\n}}\n')


COLUMNS = ("setting", "phase", "tokens", "heads", "dtype", "contender", "kind", "in_place", "bits", "us", "samples")


def packed(record: Record) -> list[Any]:
    """The columns of one row of the file; "us" are median, 10th and 90th percentile, to four digits."""
    c, t = record.case, record.time
    heads = [c.heads.q, c.heads.k, c.heads.head_dim, c.heads.rotary_dim]
    us = [float(f"{value:.4g}") for value in (t.median, t.p10, t.p90)]
    facts = [record.contender, record.kind, record.in_place, record.bits]
    return [record.setting, c.phase, c.tokens, heads, c.dtype, *facts, us, t.samples]


def read(path: Path) -> Results:
    data = json.loads(path.read_text())
    records = []
    for values in data["records"]:
        row = dict(zip(data["columns"], values, strict=True))
        case = Case(row["phase"], row["tokens"], Heads(*row["heads"]), row["dtype"])
        facts = (row["setting"], case, row["contender"], row["kind"], row["in_place"], row["bits"])
        median, p10, p90 = row["us"]
        records.append(Record(*facts, Summary(median, p10, p90, row["samples"])))
    return Results(data["machine"], records, data["left_out"])


def unique(values: Iterable[Any]) -> list[Any]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(values))


def caches() -> dict[str, int]:
    """Bytes of each level of data cache that the first core sees; empty where the system does not say."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (folder / "type").read_text().strip() != "Instruction":
            size = (folder / "size").read_text().strip()
            unit = {"K": 1024, "M": 1024**2}[size[-1]]
            sizes["L" + (folder / "level").read_text().strip()] = int(size[:-1]) * unit
    return sizes


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "caches": caches(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rope_ext": {key: value for key, value in rope_ext.build_info().items() if key != "library"},  # a path
    }
