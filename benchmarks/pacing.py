"""Pacing: how close a run comes to its bound, under a virtual clock and with heavy-tailed generation times.

"Ours" is the real Rollouter with its StalenessPolicy, Ledger and MessageQueue. The other systems are their published
rules in a short rollouter: verl's count of samples between two syncs, AReaL's capacity with batches by age, and
dropping groups that are too old when they are read. Engines and trainer are the same for all: every prompt has its
own generation time, also at a second attempt; slots do not slow each other down; an optimizer step takes a constant
time, and every `--trigger` steps a sync begins a version. A sync stops the trainer for `--export` seconds and then
the engines for `--pause` seconds, while the trainer continues.

Ours runs with the default strategy, and with `mask`, which trains overtaken groups without the tokens that are too
old. These tokens count as wasted, and not as trained.

The bound is the throughput of the slower side, generation or training, if it never waited and nothing was wasted.
`Outcome` defines age, waste and idle. Each other system runs with a grid of settings; the table shows its fastest
setting whose trained groups were all within ours' maximum age. Drop-on-read enforces the maximum age, as ours does;
verl and AReaL do not, so theirs is the observed one.

A group occupies its slot for the time of its longest response. With `--scatter` the other responses are shorter, which
decides which tokens of a group are old; without, all are equally long.

With several epochs every prompt repeats, with a generation time that varies by `--noise`, and all rules get the same
occurrences. Ours then remembers how long prompts took; "no memory" is ours on the same generation times, but with data
that repeats no prompt. The first epoch, without any memory, counts.

With `--sync-every` below `--trigger` versions are shorter, and the maximum age is increased so that the largest lag in
optimizer steps stays the same: tokens of `(age + 1) * trigger` steps are trained, and no older ones. All rules get the
shorter versions.

The clairvoyant cannot be built: it knows how long each prompt will take, and begins the long ones early in a version.
It shows what scheduling alone can reach at the same maximum age. The limit without knowledge is the throughput of the
best rule that learns how long a group takes only by generating it; `simulation.limit` computes it.

Results beyond docs/performance.md, with the arguments that reproduce them:

- `--epochs 1 --ages 1 --longest 1.5 --seeds 6`: `pace` reaches 99.6 to 100.1 % of what the best rule without
  knowledge of lengths reaches (lognormal 95.1 and 93.3 %, pareto 94.2 and 92.8 %); `mask` reaches 98.8, 97.9, 98.5
  and 97.1 %; the clairvoyant 99.4 % or more.
- The same with `--sync-every 1`: 99.8 % or more where a sync takes no time; with `--export` and `--pause` of 1 % of a
  version together 97.9 %, of 2 % together 96.0 %.
- `--scatter 0.3`: short responses of a late group are too old as a whole, and `mask` reaches 95.9 to 97.8 %.
- `--epochs 5 --ages 1 --longest 1.5 --seeds 6` (1024 prompts, `--noise 0.3`): `pace` 97.9 % or more, without memory
  92.3 % or more; with `--noise 0.5` 96 %, with `--epochs 2` 95 to 96 %.
- `--ages 1 --longest 3`: some prompts never fit a maximum age of 1. `pace` quarantines them after
  `rollout.max_attempts` and has 93 % after 20 versions and 87 % after 60; `mask` quarantines none and has 92 to 99 %.
- Rules without knowledge that gain less than a point or cost throughput: cancel at the last batch of a version
  (+0.6); restart groups of the last 5 % of a version (+0.9); let the trainer wait for slow groups (-2 to +0.2);
  `staleness_strategy: wait` (71 to 78 % of the bound); one sample of a late group first (-2.2 to +3.0 points, and
  short samples are favoured).
- Without the queue's order by oldest version, 27 % of the tokens are wasted instead of none (lognormal,
  longest 1.5, age 1, training slower, seed 0).

    python benchmarks/pacing.py [--ages 1 2] [--longest 0.75 1.5] [--epochs 1 5] [--sync-every 4] [--json rows.json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from results.row import Row, write_rows
from simulation.clock import VirtualLoop, now
from simulation.limit import limit
from simulation.others import Clairvoyant, Other, Rule, areal, drop_on_read, paced, verl
from simulation.ours import Ours
from simulation.world import Scenario, World

BALANCES = {0.5: "generation bound", 1.0: "balanced", 2.0: "training bound"}
LABELS = {
    "share": "throughput",
    "age": "mean age",
    "max_age": "largest age",
    "waste": "waste",
    "trainer_idle": "trainer idle",
    "engines_idle": "engines idle",
}


@dataclass(frozen=True)
class Outcome:
    """The result of a rule after the warm-up.

    Attributes:
        setting: of the rule.
        share: throughput over the bound, in trained tokens.
        age, max_age: mean and largest age of a trained group, in versions.
        waste: share of generated tokens that will not be trained.
        trainer_idle: share of time in which the trainer waited for groups.
        engines_idle: share of slot time without generation.
    """

    setting: str
    share: float
    age: float
    max_age: float
    waste: float
    trainer_idle: float
    engines_idle: float


System = Ours | Other


async def train(world: World, system: System) -> None:
    """The trainer's loop, as `train.trainer.Trainer` has it."""
    scenario, adoption = world.scenario, None
    for step in range(scenario.versions * scenario.trigger):
        began = now()
        batch = await system.take(scenario.batch)
        world.waited_s += now() - began
        world.learn(batch)
        await asyncio.sleep(scenario.step_s)
        await system.trained(batch)
        if (step + 1) % scenario.trigger == 0:
            if adoption is not None:
                await adoption
            if scenario.export_s:
                await asyncio.sleep(scenario.export_s)
            world.begin_version()
            if scenario.pause_s:
                adoption = asyncio.create_task(adopt(world, system))
            else:
                await system.begin_version(world.version)
            if world.version == scenario.warm_up:
                world.reset()


async def adopt(world: World, system: System) -> None:
    """The engines stop, and continue with the newest version."""
    await asyncio.sleep(world.scenario.pause_s)
    await system.begin_version(world.version)


async def simulate(scenario: Scenario, make: Callable[[World], System], setting: str) -> Outcome:
    """One run, from a virtual time of 0."""
    world = World(scenario, scenario.durations())
    system = make(world)
    await train(world, system)
    world.occupy(0)
    trained = 1 - world.masked_s / world.taken_s
    steps = len(world.ages) / scenario.batch
    vain_s = world.wasted_s + world.masked_s
    elapsed = now() - world.reset_at
    outcome = Outcome(
        setting,
        share=max(steps * scenario.step_s * trained, (world.busy_s - vain_s) / scenario.slots) / elapsed,
        age=statistics.mean(world.ages),
        max_age=max(world.ages),
        waste=vain_s / world.busy_s,
        trainer_idle=world.waited_s / elapsed,
        engines_idle=max(0.0, 1 - world.busy_s / elapsed / scenario.slots),  # rounding
    )
    await system.stop()
    return outcome


def run(scenario: Scenario, seeds: int, make: Callable[[World], System], setting: str) -> Outcome:
    """Means over seeds, and the largest age."""
    outcomes = []
    for seed in range(seeds):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            outcomes.append(runner.run(simulate(replace(scenario, seed=seed), make, setting)))
    means = {f.name: statistics.mean(getattr(o, f.name) for o in outcomes) for f in fields(Outcome)[1:]}
    return Outcome(setting, **means | {"max_age": max(o.max_age for o in outcomes)})


def grids(scenario: Scenario, max_age: int) -> dict[str, list[Rule]]:
    """The settings of each other system."""
    thresholds = {0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, *range(4, max_age + 1)}
    rooms = {0.5, 1.0, 1.5, 2.0, 3.0, *range(4, max_age + 2)}
    a_batch = 1 / scenario.trigger  # of a version; the least that a queue must hold
    return {
        "verl's count": [verl(scenario, threshold) for threshold in sorted(thresholds)],
        "AReaL's capacity": [areal(scenario, eta) for eta in range(max_age + 2)],
        "drop on read": [drop_on_read(scenario, max_age, room) for room in sorted(rooms) if room >= a_batch],
    }


def best(scenario: Scenario, seeds: int, rules: Sequence[Rule], max_age: int) -> Outcome:
    """The fastest setting within the maximum age, the first of equal ones; at 0 every setting is within it."""
    outcomes = [run(scenario, seeds, partial(Other, rule=rule), rule.setting) for rule in rules]
    return max((o for o in outcomes if o.max_age <= max_age), key=lambda o: round(o.share, 4))


def measure(scenario: Scenario, seeds: int, max_age: int) -> dict[str, Outcome]:
    """Every rule at one maximum age."""
    setting = f"max_staleness {max_age}"
    ours = {"ours": run(scenario, seeds, partial(Ours, max_staleness=max_age, memory=True), setting)}
    if scenario.epochs > 1:
        ours["ours, no memory"] = run(scenario, seeds, partial(Ours, max_staleness=max_age, memory=False), setting)
    if max_age:
        masks = partial(Ours, max_staleness=max_age, memory=True, strategy="mask")
        ours["ours, mask"] = run(scenario, seeds, masks, setting)
    rule = paced(scenario, max_age)
    clairvoyant = run(scenario, seeds, partial(Clairvoyant, rule=rule, max_age=max_age), rule.setting)
    others = {name: best(scenario, seeds, rules, max_age) for name, rules in grids(scenario, max_age).items()}
    return {**ours, "clairvoyant": clairvoyant, **others}


def rows(case: str, outcomes: dict[str, Outcome], unknowing: float) -> Iterator[Row]:
    """Ours beside the bound, beside the limit, and beside each other system in every measurement."""
    ours = outcomes["ours"]
    yield row(f"{case}: throughput beside the bound", "of the bound", ours.share, 1.0)
    yield row(f"{case}: throughput beside the limit without knowledge", "of the bound", ours.share, unknowing)
    units = {"share": "of the bound", "age": "versions", "max_age": "versions"}
    for name, other in outcomes.items():
        for measured in fields(Outcome)[1:] if name != "ours" else ():
            key = measured.name
            label, unit = f"{case}: {LABELS[key]} beside {name}", units.get(key, "ratio")
            yield row(label, unit, getattr(ours, key), getattr(other, key))


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Scenario, int]]:
    """The requested cases: name, scenario, and maximum age in its versions."""
    requested = itertools.product(args.epochs, args.tails, args.longest, args.ages, BALANCES, args.sync_every)
    for epochs, tail, longest, age, balance, steps in requested:
        more = args.trigger // steps  # versions for one of `trigger` steps
        max_age = (age + 1) * more - 1
        sizes = (args.batch, steps, args.engines, args.versions * more)
        scenario = Scenario(
            tail, longest * more, balance, *sizes, epochs, args.noise, args.export, args.pause, args.scatter, seed=0
        )
        synced = f", synced every {steps}: {max_age}" if more > 1 else ""
        name = f"{tail}, longest {longest:g} versions, {BALANCES[balance]}, max age {age}{synced}, epochs {epochs}"
        yield name, scenario, max_age


def row(name: str, unit: str, ours: float, other: float) -> Row:
    return Row(name, unit, round(ours, 4), round(other, 4), round(ours / other, 4) if other else None)


def show(case: str, outcomes: dict[str, Outcome], unknowing: float) -> None:
    print(f"\n{case}")
    print(f"  {'':18}{'setting':28}{'of bound':>9}{'age':>7}{'max':>5}{'waste':>8}{'idle: trainer':>15}{'engines':>9}")
    for name, o in outcomes.items():
        print(
            f"  {name:18}{o.setting:28}{o.share:>9.1%}{o.age:>7.2f}{o.max_age:>5.0f}{o.waste:>8.1%}"
            f"{o.trainer_idle:>15.1%}{o.engines_idle:>9.1%}"
        )
    print(f"  {'limit':18}{'without knowledge':28}{unknowing:>9.1%}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tails", nargs="+", choices=["lognormal", "pareto"], default=["lognormal", "pareto"])
    parser.add_argument("--ages", nargs="+", type=int, default=[1, 2], help="maximum ages, in versions")
    parser.add_argument("--longest", nargs="+", type=float, default=[0.75, 1.5], help="generation, in versions")
    parser.add_argument("--batch", type=int, default=32, help="groups of an optimizer step")
    parser.add_argument("--trigger", type=int, default=4, help="optimizer steps of a version")
    parser.add_argument("--sync-every", nargs="+", type=int, help="optimizer steps, of which --trigger is a multiple")
    parser.add_argument("--engines", type=int, default=2, help="of 16 groups at once")
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--epochs", nargs="+", type=int, default=[1, 5], help="how often a prompt is trained")
    parser.add_argument("--noise", type=float, default=0.3, help="sigma of a prompt's times, lognormal, over epochs")
    parser.add_argument("--export", type=float, default=0.0, help="seconds of a sync that hold up the trainer")
    parser.add_argument("--pause", type=float, default=0.0, help="and the engines; a group takes 10")
    parser.add_argument("--scatter", type=float, default=0.0, help="sigma of the lengths in a group of 8, lognormal")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.sync_every = args.sync_every or [args.trigger]
    if wrong := [steps for steps in args.sync_every if steps < 1 or args.trigger % steps]:
        parser.error(f"--sync-every {wrong[0]}: --trigger {args.trigger} is no multiple of it")
    return args


def main() -> None:
    args = parse_arguments()
    table: list[Row] = []
    for case, scenario, max_age in cases(args):
        outcomes = measure(scenario, args.seeds, max_age)
        unknowing = limit(scenario, max_age)
        show(case, outcomes, unknowing)
        table += rows(case, outcomes, unknowing)
    if args.json:
        write_rows(args.json, table)


if __name__ == "__main__":
    main()
