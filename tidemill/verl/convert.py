"""Converts a verl command to a run file: every setting is converted, listed as left out, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tidemill.config.reading import apply_override, parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.verl.hydra import Unresolved, read_settings, verl_defaults
from tidemill.verl.rules import (
    ACTOR,
    CORRECTION,
    KWARGS,
    OVERLONG,
    REWARD_PLACES,
    ROLLOUT,
    UNLIKE,
    Becomes,
    LeftOut,
    Only,
    Part,
    either,
    rule_of,
)

REQUIRED = {
    "actor_rollout_ref.model.path": "not given, and needed",
    "data.train_files": "not given, and needed",
    "rollout.total_rollout_steps": "needed as a number: prompts times epochs for all of them",
}
ANSWER = "reward_model.ground_truth"
"""The column with the reference answer in verl's files."""
LOOK_AT = (
    "rewards: verl chooses a reward by data_source; math_verify stands for it here. Name your functions.",
    "asynchrony.max_staleness: a hard bound on every token, which verl does not have; see docs/from_verl.md.",
    "rollout.group_timeout_s, trainer.get_timeout_s: verl waits without a deadline. Long responses may need more.",
)
LOOK_AT_OPTIONS = "rewards.0.options: verl's reward_kwargs. Let rewards.0.function name the function that takes them."


@dataclass(slots=True)
class Conversion:
    """The result of a conversion so far.

    Attributes:
        ours: value by key of Tidemill.
        left_out: reason by `key = value` of verl.
        refused: reason by `key = value` of verl.
        rewards: the reward functions, each with its options.
    """

    ours: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    rewards: list[dict[str, Any]] = field(default_factory=lambda: [{"function": "math_verify"}])

    def yaml(self, settings: Sequence[str]) -> str:
        """The run file, with notices as comments above it."""
        tree = nested(self.ours)
        tree["data"]["answer_key"] = ANSWER
        tree["rewards"] = self.rewards
        for setting in settings:
            apply_override(tree, setting)
        ordered = {name: tree.pop(name) for name in RunConfig.model_fields if name in tree} | tree
        text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
        parse_config(text)
        left_out = [f"{setting}: {why}" for setting, why in self.left_out.items()]
        look_at = [*LOOK_AT, *([LOOK_AT_OPTIONS] if "options" in self.rewards[0] else [])]
        return "\n".join([*comment("Look at", look_at), *comment("Left out of the verl command", left_out), "", text])


def convert(
    overrides: Sequence[str], settings: Sequence[str], environment: Mapping[str, str], config: Path | None = None
) -> str:
    """The run file of a verl command, as YAML with notices in comments.

    Args:
        overrides: the words of verl's command after its module, see `read_settings`.
        settings: `key.path=value` of Tidemill, which replace values of the run file.
        environment: variables for `${oc.env:NAME}` and `~/`.
        config: a Hydra YAML file that the overrides are applied to.

    Raises:
        ConfigError: naming every setting without a counterpart.
    """
    given, defaults = read_settings(overrides, config, environment)
    done = Conversion()
    changed = {key: value for key, value in given.items() if not same(value, defaults.get(key)) or key not in defaults}
    for key, value in changed.items():
        take(done, key, value)
    for key in [*(key for key in given if key not in changed), *(key for key in UNLIKE if key not in given)]:
        take_default(done, key, defaults[key], "" if key in given else " (verl's default)")
    needed = {**{key: defaults[key] for key in UNLIKE}, **given}
    done.refused |= {key: why for key, why in REQUIRED.items() if needed.get(key) is None}
    known = {**defaults, **given}
    if not done.refused:
        done.ours |= combined(done, known)
        add_rewards(done, known)
    if done.refused:
        lines = "".join(f"\n  {setting}: {why}" for setting, why in done.refused.items())
        fix = f"Append KEY=VALUE to the command to replace a setting, or ~KEY to take it out.{lines}"
        found = f"{len(done.refused)} setting{'' if len(done.refused) == 1 else 's'} without a counterpart"
        raise ConfigError("verl command", found, "settings that Tidemill can convert", fix)
    return done.yaml(settings)


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal; True is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def take_default(done: Conversion, key: str, value: Any, origin: str) -> None:
    """Take a default of verl, unless another setting says the same thing; what has no effect passes silently."""
    rule = rule_of(key)
    if isinstance(rule, Becomes):
        if rule.key not in done.ours and value is not None:
            take(done, key, value, origin)
    elif isinstance(rule, Only) and key in UNLIKE:
        take(done, key, value, origin)


def take(done: Conversion, key: str, value: Any, origin: str = "") -> None:
    shown = f"{key} = {value.why if isinstance(value, Unresolved) else value}{origin}"
    rule = rule_of(key)
    if isinstance(rule, LeftOut):
        done.left_out[shown] = rule.why
    elif rule is None:
        done.refused[shown] = "not known; Tidemill has nothing that does this"
    elif isinstance(rule, Only) and not rule.values:
        done.refused[shown] = rule.why
    elif isinstance(value, Unresolved):
        done.refused[shown] = "only Hydra can tell the value; write it out"
    elif isinstance(rule, Only):
        if any(same(value, meant) for meant in rule.values):
            done.left_out[shown] = f"always so: {rule.why}"
        else:
            done.refused[shown] = f"only {either(rule.values)}; {rule.why}"
    elif isinstance(rule, Part):
        if not fits(rule, value) and (value is not None or key in UNLIKE):
            done.refused[shown] = f"only {allowed(rule)}"
    elif value is None and (key in REQUIRED or key not in UNLIKE):
        done.left_out[shown] = "sets nothing"
    else:
        become(done, rule, shown, value)


def allowed(rule: Part) -> str:
    return " or ".join(rule.words) or ("True or False" if bool in rule.kinds else "a number of at least 0")


def fits(rule: Part, value: Any) -> bool:
    if rule.words or not rule.kinds:
        return not rule.kinds or value in rule.words
    number = isinstance(value, rule.kinds) and isinstance(value, bool) == (bool in rule.kinds)
    return number and 0 <= value < math.inf


def become(done: Conversion, rule: Becomes, shown: str, value: Any) -> None:
    if value is None:
        done.refused[shown] = "only a value; verl has one by default"
        return
    try:
        converted = rule.convert(value)
    except ValueError as error:
        done.refused[shown] = f"only {error}"
        return
    if done.ours.setdefault(rule.key, converted) != converted:
        done.refused[shown] = f"another setting makes {rule.key} = {done.ours[rule.key]}"


def combined(done: Conversion, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Tidemill that follow from several of verl's, whose rules are `Part`."""
    threshold, partial = known["async_training.staleness_threshold"], known["async_training.partial_rollout"]
    ours = {
        "asynchrony.staleness_threshold": threshold,
        "asynchrony.max_staleness": math.ceil(threshold),
        "rollout.engines": whole_engines(known),
        "rollout.tensor_parallel_size": known[f"{ROLLOUT}tensor_model_parallel_size"],
        "trainer.ranks": known["trainer.nnodes"] * known["trainer.n_gpus_per_node"],
        "algorithm.kl_loss_coef": known[f"{ACTOR}kl_loss_coef"] if known[f"{ACTOR}use_kl_loss"] else 0.0,
    }
    batches = done.ours.get("asynchrony.require_batches", 1)
    if warmup := done.ours.get("trainer.warmup_steps"):  # verl counts steps of the trainer, we count optimizer steps
        ours["trainer.warmup_steps"] = warmup * batches
    per_version = known[f"{ACTOR}ppo_mini_batch_size"] * batches * known["async_training.trigger_parameter_sync_step"]
    if threshold * per_version + 1e-9 >= 1:
        ours["asynchrony.partial_rollout"] = partial
    else:
        done.left_out[f"async_training.partial_rollout = {partial}"] = (
            f"staleness_threshold adds no group to the {per_version} of a version: none is in flight at a sync"
        )
    if known[f"{ROLLOUT}standalone_gpu_memory_utilization"] is not None:
        ours["rollout.gpu_memory_utilization"] = known[f"{ROLLOUT}standalone_gpu_memory_utilization"]
    return ours | old_log_probs(done, known)


def old_log_probs(done: Conversion, known: Mapping[str, Any]) -> dict[str, Any]:
    """`algorithm.old_log_prob`: verl computes old log-probs itself unless it bypasses that, and may weight tokens."""
    computed = not known[f"{CORRECTION}bypass_mode"] or known.get("async_training.compute_prox_log_prob") is True
    weighting, cap = known[f"{CORRECTION}rollout_is"], known[f"{CORRECTION}rollout_is_threshold"]
    if weighting and not computed:
        done.refused[f"{CORRECTION}rollout_is = {weighting}"] = (
            "only with bypass_mode=False; the ratio to the engine's log-probs already corrects"
        )
    if weighting:
        ours = {"algorithm.old_log_prob": "decoupled", f"{CORRECTION}rollout_is": weighting}
        return ours if cap is None else ours | {f"{CORRECTION}rollout_is_threshold": cap}
    if not same(cap, verl_defaults()[f"{CORRECTION}rollout_is_threshold"]):
        done.left_out[f"{CORRECTION}rollout_is_threshold = {cap}"] = "it has no effect without rollout_is"
    return {"algorithm.old_log_prob": "version_start"} if computed else {}


def whole_engines(known: Mapping[str, Any]) -> int:
    key = f"{ROLLOUT}tensor_model_parallel_size"
    gpus, each = known["rollout.nnodes"] * known["rollout.n_gpus_per_node"], known[key]
    if not 1 <= each <= gpus or gpus % each:
        raise ConfigError(key, each, f"a divisor of the {gpus} GPUs for rollout", "Change one of the two.")
    return int(gpus // each)


def add_rewards(done: Conversion, known: Mapping[str, Any]) -> None:
    """The options of the user's reward function, and DAPO's punishment of long responses where it is on."""
    options = {
        key.removeprefix(f"{name}."): value
        for key, value in known.items()
        for name in KWARGS
        if key.startswith(f"{name}.")
    }
    if options:
        done.rewards[0]["options"] = nested(options)
    for place in REWARD_PLACES:
        punish_overlong(done, known, place)


def punish_overlong(done: Conversion, known: Mapping[str, Any], place: str) -> None:
    """DAPO's punishment of long responses; its settings are below `place`."""
    parts = {
        "budget": f"{place}reward_kwargs.max_resp_len",
        "buffer": f"{place}{OVERLONG}len",
        "penalty": f"{place}{OVERLONG}penalty_factor",
    }
    given = {name: known[key] for name, key in parts.items() if known.get(key) is not None}
    if not known.get(f"{place}{OVERLONG}enable"):
        off = "overlong_buffer_cfg.enable is off"
        done.left_out |= {f"{parts[name]} = {value}": off for name, value in given.items()}
        return
    missing = [key for name, key in parts.items() if name not in given]
    done.refused |= dict.fromkeys(missing, "not given, and needed with overlong_buffer_cfg.enable")
    if {"budget", "buffer"} <= given.keys() and not 0 < given["buffer"] <= given["budget"]:
        done.refused[f"{parts['buffer']} = {given['buffer']}"] = f"only from 1 to max_resp_len = {given['budget']}"
    done.rewards.append({"function": "overlong", "options": given})


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def comment(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A list as YAML comments, each item on one line whatever characters it holds."""
    if lines:
        yield f"# {title}:"
        yield from ("#   " + "".join(filter(str.isprintable, " ".join(line.split()))) for line in lines)
