"""The limit of what pacing can reach without knowing how long a prompt will take. Pure arithmetic, a linear program.

One slot of an engine passes through the phases of a version again and again. Whenever it is free it begins a prompt,
either one that was never begun or one that was cancelled before, of which is known how long it took at least. It
chooses how long it lets that prompt run; what has not ended by then is cancelled and must come back. A prompt that
begins at phase f (in versions) may run until the trainer takes the last batch of the last version that may train it,
for max_age + 1 - f - r, with r the time of an optimizer step.

Rates at which a slot begins prompts, by phase, by the time that is known and by the time that it lets them run, are the
variables (the occupancy measure of an average-reward semi-Markov decision process; Puterman 1994, chapter 11). They
balance the phases that are left against those that are reached, and what is cancelled against what comes back, and
maximise the share of time in prompts that end. How slots share prompts, queue and trainer is left out, so that no rule
of this kind is better in the long run, as far as all versions last equally long. They last longer where less is
reached; that is solved by iteration.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

from simulation.world import FloatArray, Scenario

BINS = 32  # of a version
ROUNDS = 8
CLOSE = 1e-3

Column = tuple[dict[int, float], float]


def limit(scenario: Scenario, max_age: int) -> float:
    """Highest throughput over the bound of `Outcome.share`, within the rounding to 1 / `BINS` of a version."""
    seconds = scenario.durations()
    version_s = max(scenario.generate_s, scenario.step_s * scenario.trigger)
    share = 1.0
    for _ in range(ROUNDS):
        bin_s = version_s / share / BINS
        bins = np.maximum(1, np.rint(seconds / bin_s)).astype(int)
        latest = int((max_age + 1) * BINS - scenario.step_s / bin_s)
        useful = most_useful(np.bincount(bins) / len(bins), latest)
        before, share = share, min(1.0, useful * version_s / scenario.generate_s)
        if abs(share - before) < CLOSE:
            break
    return max(share, before)


def most_useful(ends: FloatArray, latest: int) -> float:
    """Largest share of a slot's time in prompts that end.

    Args:
        ends: `[K + 1]` share of prompts that take 0, 1, ... K bins.
        latest: bins from the beginning of a version until all that began in it must have ended.
    """
    longest = len(ends) - 1
    if longest <= latest - BINS:
        return 1.0  # everything fits wherever it begins
    columns = list(choices(ends, latest))
    entries = [(row, place, value) for place, (flow, _) in enumerate(columns) for row, value in flow.items()]
    rows, places, values = (np.array(part) for part in zip(*entries, strict=True))
    time_row = BINS + longest - 1
    balances = csc_array((values, (rows, places)), shape=(time_row + 1, len(columns)))
    unit_time = np.zeros(time_row + 1)
    unit_time[time_row] = 1.0
    solved = linprog([-useful for _, useful in columns], A_eq=balances, b_eq=unit_time, method="highs")
    return float(-solved.fun)


def choices(ends: FloatArray, latest: int) -> Iterator[Column]:
    """What a slot can do: its flow between phases, cancelled prompts and time, and its useful time.

    Rows are the `BINS` phases, prompts that are known to take more than 1, ... K - 1 bins, and time.
    """
    longest = len(ends) - 1
    for phase in range(BINS):
        yield {phase: 1.0, (phase + 1) % BINS: -1.0, BINS + longest - 1: 1.0}, 0.0  # nothing, for a bin
        for known in range(longest):
            if ends[known + 1 :].any():
                for patience in range(known + 1, min(latest - phase, longest) + 1):
                    yield begin(ends, phase, known, patience)


def begin(ends: FloatArray, phase: int, known: int, patience: int) -> Column:
    """Begin a prompt that takes more than `known` bins, 0 for any, and let it run for `patience` bins."""
    longest = len(ends) - 1
    chances = ends[known + 1 :] / ends[known + 1 :].sum()
    taken = np.minimum(np.arange(known + 1, longest + 1), patience)
    in_time = np.arange(known + 1, longest + 1) <= patience
    flow = {phase: 1.0, BINS + longest - 1: float(chances @ taken)}
    for reached, chance in zip((phase + taken) % BINS, chances, strict=True):
        flow[int(reached)] = flow.get(int(reached), 0.0) - chance
    if known:
        flow[BINS + known - 1] = -1.0
    cancelled = float(chances[~in_time].sum())
    if cancelled:
        flow[BINS + patience - 1] = flow.get(BINS + patience - 1, 0.0) + cancelled
    return flow, float(chances[in_time] @ taken[in_time])
