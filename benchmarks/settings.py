"""The processes that a run consists of, and what each of them measures."""

from __future__ import annotations

from dataclasses import dataclass, field

import rope_ext
from benchmarks.cases import DECODE, DTYPES, GROWING, MAIN, OTHERS, PREFILL, Case
from benchmarks.results import ALL, BLOCK, ONE, WARM

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CORES = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
# malloc returns large blocks to the system and gets them back as untouched pages: without this, clones of megabytes
# measure page faults
WARM_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30)}
COMPILED = {("bf16", n) for n in (1, 64, 512, 2048, 8192)} | {("fp32", n) for n in (1, 64, 512)}


@dataclass(frozen=True)
class Setting:
    name: str
    cases: list[Case]
    env: dict[str, str] = field(default_factory=dict)
    today: bool = False  # all that users have today; else eager LLaMA alone
    peers: bool = False

    @property
    def pinned(self) -> bool:
        """To one core: whoever brings threads of his own runs them there too."""
        return "OMP_NUM_THREADS" in self.env

    def compiles(self, case: Case) -> bool:
        """Inductor takes seconds for a shape."""
        return self.today and case.heads == MAIN and (case.dtype, case.tokens) in COMPILED


def sizes(decode: tuple[int, ...], prefill: tuple[int, ...], dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Case]:
    phases = [("decode", n) for n in decode] + [("prefill", n) for n in prefill]
    return [Case(phase, n, MAIN, dtype) for dtype in dtypes for phase, n in phases]


def forced(level: str) -> dict[str, str]:
    return ONE_THREAD | {"ATEN_CPU_CAPABILITY": level}


def settings(quick: bool) -> dict[str, Setting]:
    """By name, those of every instruction set level in the binary included."""
    levels = rope_ext.build_info()["cpu_isa_built"]
    if quick:
        dtypes = ("bf16", "fp32")
        chosen = [
            Setting(ONE, sizes((1, 64), (512, 2048), dtypes), ONE_THREAD, peers=True),
            Setting(ALL, sizes((8,), (512,), dtypes), CORES),
            Setting(WARM, sizes((), (2048,), dtypes), ONE_THREAD | WARM_MALLOC),
            *(Setting(level, sizes((1, 64), (512,), dtypes), forced(level)) for level in levels),
        ]
        return {setting.name: setting for setting in chosen}
    others = [
        Case(phase, n, heads, dtype)
        for heads in OTHERS
        for dtype in DTYPES
        for phase, n in (("decode", 1), ("decode", 64), ("prefill", 512))
    ]
    growing = [Case("decode", 64, heads, "bf16") for heads in GROWING if heads != MAIN]
    one = sizes(DECODE, PREFILL[:-1]) + sizes((), PREFILL[-1:], ("bf16",)) + others + growing
    chosen = [
        Setting(ONE, one, ONE_THREAD, today=True, peers=True),
        Setting(ALL, sizes(DECODE[1:], PREFILL[1:-1]), CORES),
        Setting(WARM, sizes((), PREFILL[1:-1]), ONE_THREAD | WARM_MALLOC, peers=True),
        *(Setting(level, sizes((1, 64, 256), (128, 512, 2048)), forced(level)) for level in levels),
        Setting(BLOCK, [], ONE_THREAD),
    ]
    return {setting.name: setting for setting in chosen}
