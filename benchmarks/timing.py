"""Times several ways of doing one thing so that they can be compared on a machine that is never quite quiet.

All contenders of a case run in one process, in rounds of shuffled order, so that what disturbs one disturbs all. A
sample is the mean of as many calls as fill 200 us, or of one longer call, after an untimed call that brings its data
into the caches. A contender is summed up by the median of its samples, with the 10th and 90th percentile for the
spread; ratios are of medians, and of 10th percentiles where noise is larger than the difference.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from timeit import Timer

import torch

SAMPLE_S = 200e-6
ROUNDS = 31
FEWEST_ROUNDS = 5
WARM_UP_BELOW_S = 5e-3  # a longer call leaves nothing in the caches that the next one would find


@dataclass(frozen=True)
class Timed:
    """An expression over some names; run with `threads` threads, or with torch's own number."""

    statement: str
    names: dict[str, object]
    threads: int | None = None


@dataclass(frozen=True)
class Summary:
    """Microseconds per call."""

    median: float
    p10: float
    p90: float
    samples: int


def summarise(samples: list[float]) -> Summary:
    if len(samples) < 2:
        return Summary(samples[0], samples[0], samples[0], 1)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Summary(statistics.median(samples), tenths[0], tenths[-1], len(samples))


def measure(contenders: dict[str, Timed], budget_s: float) -> dict[str, list[float]]:
    """Samples of each contender in microseconds per call: ROUNDS of them, or what fits in the budget (seconds)."""
    threads = torch.get_num_threads()
    timers, calls, round_s = {}, {}, 0.0
    for name, timed in contenders.items():
        torch.set_num_threads(timed.threads or threads)
        timer = Timer(timed.statement, globals=timed.names)
        timer.timeit(1)  # the first call may compile, allocate and start threads
        once = timer.timeit(1)
        if once < SAMPLE_S:
            once = timer.timeit(20) / 20
        timers[name], calls[name] = timer, max(1, math.ceil(SAMPLE_S / once))
        round_s += once * calls[name]

    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(min(ROUNDS, max(FEWEST_ROUNDS, int(budget_s / round_s)))):
        for name in random.sample(list(contenders), len(contenders)):
            torch.set_num_threads(contenders[name].threads or threads)
            last = samples[name][-1] if samples[name] else 0.0
            if last < WARM_UP_BELOW_S * 1e6:
                timers[name].timeit(1)
            samples[name].append(timers[name].timeit(calls[name]) / calls[name] * 1e6)
    torch.set_num_threads(threads)
    return samples
