"""What happens in the process of one setting: contenders enter, are checked, and are timed together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import block, contenders
from benchmarks.cases import Case, Inputs, inputs
from benchmarks.contenders import Contender, LeftOut, same_bits
from benchmarks.peers import PEERS
from benchmarks.results import ALL, BLOCK
from benchmarks.settings import Setting
from benchmarks.timing import Timed, measure

BUDGET_S = 5.0  # of a case; small ones take less than one second
LeftOuts = list[tuple[str, str]]  # contender, why


def entrants(setting: Setting, case: Case, x: Inputs, left_out: LeftOuts) -> Iterator[Contender]:
    yield from contenders.floors(x)
    ours = list(contenders.ours(case, x))
    yield from ours
    if setting.name == ALL:
        yield Contender("rope::apply, one thread", "ours", ours[0].statement, ours[0].names, threads=1)
    for contender in contenders.today(case, x, setting.compiles(case)):
        if setting.today or contender.name == "eager LLaMA":
            yield contender
    for name, make in PEERS.items() if setting.peers else ():
        try:
            yield make(case, x)
        except Exception as error:  # whatever another package throws at a machine it does not like
            left_out.append((name, str(error).strip().split("\n")[0][:120]))


def rows(setting: Setting, case: Case, entered: dict[str, Contender], bits: dict[str, bool | None]) -> Iterator[Any]:
    timed = {name: Timed(c.statement, c.names, c.threads) for name, c in entered.items()}
    for name, samples in measure(timed, BUDGET_S).items():
        c = entered[name]
        facts = {"setting": setting.name, "case": asdict(case), "contender": name, "kind": c.kind}
        yield facts | {"in_place": c.in_place, "bits": bits[name], "samples": samples}


@torch.inference_mode()
def run(setting: Setting) -> dict[str, Any]:
    """Rows of all cases of a setting, in this process, whose environment is the setting's already."""
    if setting.pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found: list[Any] = []
    left_out: LeftOuts = []
    for case in setting.cases or block.CASES:
        print(f"{setting.name}: {case}", file=sys.stderr, flush=True)
        entered, bits = {}, {}
        if setting.name == BLOCK:
            candidates = block.entrants(case)
        else:
            x = inputs(case)
            candidates = entrants(setting, case, x, left_out)
        for contender in candidates:
            try:
                bits[contender.name] = same_bits(contender, x) if setting.name != BLOCK else None
                entered[contender.name] = contender
            except LeftOut as reason:
                left_out.append((contender.name, str(reason)))
        found += rows(setting, case, entered, bits)
    return {"rows": found, "left_out": left_out}
