"""The best throughput of any pacing rule that does not know generation times in advance: a linear program.

One slot of an engine passes through the phases of a version repeatedly. A free slot begins a prompt: a new one, or
one that was cancelled before, with a known minimum duration. The rule chooses how long the prompt may run; a prompt
that has not ended by then is cancelled and must be begun again. A prompt that begins at phase f (in versions) may run
until the trainer takes the last batch of the last version that may train it: for max_age + 1 - f - r, with r the time
of an optimizer step.

The variables are the rates at which a slot begins prompts, by phase, known minimum duration and permitted duration
(the occupancy measure of an average-reward semi-Markov decision process; Puterman 1994, chapter 11). The constraints
balance the phases left and reached, and the prompts cancelled and begun again. The objective is the share of time in
prompts that end. The model ignores that slots share prompts, queue and trainer, so no rule of this kind is better in
the long run if all versions last equally long. The duration of a version depends on the throughput; iteration solves
that.
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
        latest: bins from the beginning of a version until all prompts begun in it must have ended.
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
    """The choices of a slot: flow between phases, cancelled prompts and time; and the useful time.

    Rows are the `BINS` phases, prompts known to take more than 1, ... K - 1 bins, and time.
    """
    longest = len(ends) - 1
    for phase in range(BINS):
        yield {phase: 1.0, (phase + 1) % BINS: -1.0, BINS + longest - 1: 1.0}, 0.0  # idle for a bin
        for known in range(longest):
            if ends[known + 1 :].any():
                for allowed in range(known + 1, min(latest - phase, longest) + 1):
                    yield begin(ends, phase, known, allowed)


def begin(ends: FloatArray, phase: int, known: int, allowed: int) -> Column:
    """Begin a prompt that takes more than `known` bins, 0 for any, and let it run for `allowed` bins."""
    longest = len(ends) - 1
    chances = ends[known + 1 :] / ends[known + 1 :].sum()
    taken = np.minimum(np.arange(known + 1, longest + 1), allowed)
    in_time = np.arange(known + 1, longest + 1) <= allowed
    flow = {phase: 1.0, BINS + longest - 1: float(chances @ taken)}
    for reached, chance in zip((phase + taken) % BINS, chances, strict=True):
        flow[int(reached)] = flow.get(int(reached), 0.0) - chance
    if known:
        flow[BINS + known - 1] = -1.0
    cancelled = float(chances[~in_time].sum())
    if cancelled:
        flow[BINS + allowed - 1] = flow.get(BINS + allowed - 1, 0.0) + cancelled
    return flow, float(chances[in_time] @ taken[in_time])
