"""Converts a verl command to our YAML: every setting is taken over, listed as left out, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.verl.rule import Becomes, LeftOut, Never, Only, Part, either
from tidemill.verl.rules import DEFAULTS, rule_of
from tidemill.verl.script import read_settings
from tidemill.verl.word import Text, Unknown

REQUIRED = {
    "actor_rollout_ref.model.path": "not given, and needed",
    "data.train_files": "not given, and needed",
    "rollout.total_rollout_steps": "needed as a number: prompts times epochs, if it is to be all of them",
}
REWARD_PLACES = ("reward_model.", "reward.")  # of earlier and of later versions
ANSWER = "reward_model.ground_truth"  # where verl's files keep the reference answer
LOOK_AT = (
    "rewards: verl chooses by data_source; math_verify stands here. Name your functions.",
    "asynchrony.max_staleness: a hard bound on every token, which verl does not have; see docs/from_verl.md.",
    "rollout.group_timeout_s, trainer.get_timeout_s: verl waits for ever. Long responses may need more.",
)


@dataclass(slots=True)
class Conversion:
    """What became of a command.

    Attributes:
        ours: value by our dotted key.
        left_out: reason by `key = value` of verl.
        refused: reason by `key = value` of verl.
        rewards: functions, each with its options.
    """

    ours: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    rewards: list[dict[str, Any]] = field(default_factory=lambda: [{"function": "math_verify"}])

    def yaml(self) -> str:
        """A run file that says above what was left out and what to look at.

        Raises:
            ConfigError: the settings do not go together.
        """
        tree: dict[str, Any] = {}
        for key, value in self.ours.items():
            section, _, name = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = value
        tree["data"]["answer_key"] = ANSWER
        tree["rewards"] = self.rewards
        ordered = {name: tree[name] for name in RunConfig.model_fields if name in tree}
        text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
        parse_config(text)
        left = [f"{setting}: {why}" for setting, why in self.left_out.items()]
        return "\n".join([*comment("Look at", LOOK_AT), *comment("Left out of the verl command", left), "", text])


def comment(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A list as YAML comments, each on one line whatever the values of a script are."""
    if lines:
        yield f"# {title}:"
        yield from ("#   " + "".join(filter(str.isprintable, " ".join(line.split()))) for line in lines)


def convert(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The run file for a script with a verl command; see `read_settings` for the arguments.

    Raises:
        ConfigError: naming every setting without a counterpart.
    """
    settings = read_settings(script, arguments, environment)
    done = Conversion()
    known: dict[str, Any] = {}
    for key, text in settings.items():
        value = parse(text)
        take(done, key, value)
        known[key] = value
    for key, value in DEFAULTS.items():
        if key not in settings:
            known[key] = value
            if not is_said(done, key):
                take(done, key, value, "verl's default")
    done.refused |= {key: why for key, why in REQUIRED.items() if known.get(key) is None}
    if not done.refused:
        done.ours |= combined(done, known)
        for place in REWARD_PLACES:
            punish_overlong(done, known, f"{place}reward_kwargs.")
    if done.refused:
        lines = "".join(f"\n  {setting}: {why}" for setting, why in done.refused.items())
        fix = f"Change them in the script, or behind its name: KEY=VALUE replaces, ~KEY takes out.{lines}"
        raise ConfigError("settings that do not convert", len(done.refused), "0", fix)
    return done.yaml()


def is_said(done: Conversion, key: str) -> bool:
    """Whether a setting with another name says already what this one becomes."""
    rule = rule_of(key)
    return isinstance(rule, Becomes) and rule.key in done.ours


def take(done: Conversion, key: str, value: Any, origin: str = "") -> None:
    """Take one setting over, list it as left out, or refuse it."""
    shown = f"{key} = {value.why if isinstance(value, Unknown) else value}{f' ({origin})' if origin else ''}"
    rule = rule_of(key)
    if isinstance(rule, LeftOut):
        done.left_out[shown] = rule.why
    elif isinstance(rule, Never) or rule is None:
        done.refused[shown] = "not known; nothing here does what it does" if rule is None else rule.why
    elif isinstance(value, Unknown):
        done.refused[shown] = "only running the script could tell the value; write it out"
    elif isinstance(rule, Only):
        if not is_meant(rule, value):
            done.refused[shown] = f"only {either(rule.values)}; {rule.why}"
        elif not origin:
            done.left_out[shown] = f"always so: {rule.why}"
    elif isinstance(rule, Part):
        if not fits(rule, value) and (value is not None or key in DEFAULTS):
            done.refused[shown] = f"only {allowed(rule)}"
    elif value is not None or key in DEFAULTS.keys() - REQUIRED.keys():
        become(done, rule, shown, value)
    else:
        done.left_out[shown] = "sets nothing"


def is_meant(rule: Only, value: Any) -> bool:
    """Whether a value is one of those that mean the same; True is not 1."""
    return any(value == meant and isinstance(value, bool) == isinstance(meant, bool) for meant in rule.values)


def allowed(rule: Part) -> str:
    """Values that can be reckoned with, in words."""
    return " or ".join(rule.words) or ("True or False" if bool in rule.kinds else "a number from 0 on")


def fits(rule: Part, value: Any) -> bool:
    """Whether a value can be reckoned with."""
    if rule.words:
        return value in rule.words
    number = isinstance(value, rule.kinds) and isinstance(value, bool) == (bool in rule.kinds)
    return number and 0 <= value < math.inf


def become(done: Conversion, rule: Becomes, shown: str, value: Any) -> None:
    """Take over a setting that has a counterpart."""
    if value is None:
        done.refused[shown] = "only a value, which verl has by default"
        return
    try:
        converted = rule.convert(value)
    except ValueError as error:
        done.refused[shown] = f"only {error}"
        return
    if done.ours.setdefault(rule.key, converted) != converted:
        done.refused[shown] = f"another setting makes {rule.key} = {done.ours[rule.key]}"


def combined(done: Conversion, known: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings that several of verl's make; see the rules of kind `Part`."""
    threshold, partial = known["async_training.staleness_threshold"], known["async_training.partial_rollout"]
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    ours = {
        "asynchrony.staleness_threshold": threshold,
        "asynchrony.max_staleness": math.ceil(threshold),
        "rollout.engines": whole_engines(known),
        "rollout.tensor_parallel_size": known[f"{rollout}tensor_model_parallel_size"],
        "trainer.ranks": known["trainer.nnodes"] * known["trainer.n_gpus_per_node"],
        "algorithm.kl_loss_coef": known[f"{actor}kl_loss_coef"] if known[f"{actor}use_kl_loss"] else 0.0,
    }
    batches = done.ours.get("asynchrony.require_batches", 1)
    if warmup := done.ours.get("trainer.warmup_steps"):  # verl counts steps of the trainer, we count optimizer steps
        ours["trainer.warmup_steps"] = warmup * batches
    per_version = known[f"{actor}ppo_mini_batch_size"] * batches * known["async_training.trigger_parameter_sync_step"]
    if threshold * per_version + 1e-9 >= 1:
        ours["asynchrony.partial_rollout"] = partial
    else:
        done.left_out[f"async_training.partial_rollout = {partial}"] = (
            f"staleness_threshold adds no group to the {per_version} of a version: none is in flight at a weight sync"
        )
    if known.get(f"{rollout}standalone_gpu_memory_utilization") is not None:
        ours["rollout.gpu_memory_utilization"] = known[f"{rollout}standalone_gpu_memory_utilization"]
    return ours | old_log_probs(done, known)


def punish_overlong(done: Conversion, known: Mapping[str, Any], place: str) -> None:
    """DAPO's punishment of long responses, where it is on; its settings stand below `place`."""
    parts = {
        "budget": f"{place}max_resp_len",
        "buffer": f"{place}overlong_buffer_cfg.len",
        "penalty": f"{place}overlong_buffer_cfg.penalty_factor",
    }
    given = {name: known[key] for name, key in parts.items() if known.get(key) is not None}
    if not known.get(f"{place}overlong_buffer_cfg.enable"):
        off = "without overlong_buffer_cfg.enable it says nothing"
        done.left_out |= {f"{parts[name]} = {value}": off for name, value in given.items()}
        return
    missing = [key for name, key in parts.items() if name not in given]
    done.refused |= dict.fromkeys(missing, "not given, and needed with overlong_buffer_cfg.enable")
    if {"budget", "buffer"} <= given.keys() and not 0 < given["buffer"] <= given["budget"]:
        done.refused[f"{parts['buffer']} = {given['buffer']}"] = f"only from 1 to max_resp_len = {given['budget']}"
    done.rewards.append({"function": "overlong", "options": given})


def old_log_probs(done: Conversion, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the ratio is taken to; verl computes old log-probs itself unless it bypasses that, and may weight tokens."""
    correction = "algorithm.rollout_correction."
    bypassed = bool(known.get(f"{correction}bypass_mode", True))
    computed = not bypassed or known.get("async_training.compute_prox_log_prob") is True
    weighting, cap = known.get(f"{correction}rollout_is"), known.get(f"{correction}rollout_is_threshold")
    if weighting and not computed:
        done.refused[f"{correction}rollout_is = {weighting}"] = (
            "only with bypass_mode=False; the ratio to the log-probs of the engine corrects already"
        )
    if weighting:
        return {"algorithm.old_log_prob": "decoupled"} | ({} if cap is None else {"algorithm.behaviour_cap": cap})
    if cap is not None:
        done.left_out[f"{correction}rollout_is_threshold = {cap}"] = "without rollout_is it says nothing"
    return {"algorithm.old_log_prob": "version_start"} if computed else {}


def whole_engines(known: Mapping[str, Any]) -> int:
    """Engines of so many GPUs each.

    Raises:
        ConfigError: they do not share out evenly.
    """
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    gpus, each = known["rollout.nnodes"] * known["rollout.n_gpus_per_node"], known[key]
    if not 1 <= each <= gpus or gpus % each:
        raise ConfigError(key, each, f"a divisor of the {gpus} GPUs for rollout", "Change one of the two.")
    return int(gpus // each)


def parse(text: Text) -> Any:
    """A value as Hydra reads it: numbers also in the form 1e-6."""
    if isinstance(text, Unknown):
        return text
    if "${" in text:
        return Unknown(f"{text}, which Hydra works out")
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    try:
        return None if text == "None" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # such as a date that does not exist
        return Unknown(f"{text}, which is no value of Hydra's")
