"""Settings that do not fit together are refused, and those that may be a mistake are told."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from config_rig import ON_KUBERNETES, parse, refusal

from tidemill.config.validation import BOUNDS, notices, other_processor
from tidemill.errors import in_yaml
from tidemill.rollout.rewards import BUILT_IN

NEVER = "checkpoint.every=0"  # no notice of checkpoints


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("queue.capacity", ["queue.capacity=15"]),
        ("queue.capacity", ["queue.capacity=31", "asynchrony.require_batches=2"]),
        ("rollout.total_rollout_steps", ["rollout.total_rollout_steps=15", "trainer.steps=null"]),
        ("rollout.total_rollout_steps", ["rollout.total_rollout_steps=15"]),
        ("trainer.steps", ["rollout.total_rollout_steps=80"]),
        ("queue.when_full", ["queue.when_full=drop_oldest"]),
        ("queue.when_full", ["queue.when_full=drop_oldest", "queue.capacity=32"]),
        ("queue.when_full", ["queue.when_full=drop_oldest", "asynchrony.staleness_strategy=wait"]),
        (
            "queue.when_full",
            [
                *("queue.when_full=drop_oldest", "asynchrony.staleness_strategy=drop"),
                "asynchrony.staleness_threshold=0.5",
            ],
        ),
        ("asynchrony.staleness_threshold", ["asynchrony.max_staleness=0", "asynchrony.staleness_threshold=0.5"]),
        ("asynchrony.staleness_strategy", ["asynchrony.max_staleness=0", "asynchrony.staleness_strategy=drop"]),
        ("asynchrony.staleness_strategy", ["asynchrony.max_staleness=0", "asynchrony.staleness_strategy=mask"]),
        ("asynchrony.partial_rollout", ["asynchrony.max_staleness=0", "asynchrony.partial_rollout=true"]),
        ("asynchrony.partial_rollout", ["asynchrony.staleness_threshold=0", "asynchrony.partial_rollout=true"]),
        ("asynchrony.partial_rollout", ["asynchrony.staleness_threshold=0.06", "asynchrony.partial_rollout=true"]),
        ("asynchrony.staleness_strategy", ["asynchrony.staleness_threshold=0", "asynchrony.staleness_strategy=drop"]),
        ("asynchrony.pause_mode", ["asynchrony.partial_rollout=false", "asynchrony.pause_mode=abort"]),
        ("asynchrony.pause_mode", ["asynchrony.partial_rollout=true", "asynchrony.pause_mode=wait"]),
        ("evaluation.every", ["evaluation.every=1"]),
        ("registry.min_score", ["registry.min_score=0.5"]),
        ("registry.alias", ["registry.alias=champion"]),
        ("registry.alias", ["registry.alias=v1"]),
        ("registry.alias", ["registry.alias=Latest"]),
        ("rewards.0.function", ["rewards.0.function=mine:mean"]),
        ("rewards.0.function", ["rewards.0.function=mine:größe"]),
        ("algorithm.proximal", ["algorithm.proximal=loglinear"]),
        ("algorithm.proximal", ["algorithm.old_log_prob=version_start", "algorithm.proximal=loglinear"]),
        ("algorithm.rollout_correction.rollout_is_threshold", ["algorithm.rollout_correction.rollout_is_threshold=5"]),
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            ["algorithm.old_log_prob=version_start", "algorithm.rollout_correction.rollout_is_threshold=null"],
        ),
    ],
)
def test_impossible_combination_is_refused_with_key_value_allowed_and_fix(key: str, overrides: list[str]) -> None:
    error = refusal(*overrides)
    assert error.key == key
    assert all(part in str(error) for part in (key, in_yaml(error.value), error.allowed, error.fix))
    assert error.fix


@pytest.mark.parametrize("mode", ["asynchrony.partial_rollout=true", "asynchrony.staleness_strategy=drop"])
def test_threshold_that_adds_no_group_is_named_with_its_value(mode: str) -> None:
    error = refusal("asynchrony.staleness_threshold=0.06", mode)  # of 16 groups
    assert "asynchrony.staleness_threshold = 0.06, which adds no group to the 16 of a version" in error.allowed
    assert "to null or at least 1 / 16" in error.fix
    assert parse("asynchrony.staleness_threshold=0.0625", mode).max_groups_between_syncs == 17


def test_an_evaluation_mode_that_cannot_work_is_refused() -> None:
    held_out = "data.held_out=held.jsonl"
    assert refusal(held_out, "evaluation.mode=concurrent").key == "evaluation.mode"
    spare = refusal(held_out, "evaluation.mode=spare", "evaluation.every=2")
    assert "rollout.engines = 1" in str(spare)


@pytest.mark.parametrize(
    ("folder", "elsewhere", "meaning"),
    [
        ("/runs/a,b", "store.endpoint=http://store:9000", "the embedded store reads two folders"),
        ("/runs/a?b", "tracking.uri=http://mlflow:5000", "MLflow reads the end of the file name"),
        ("/runs/a%20b", "tracking.uri=http://mlflow:5000", "MLflow reads an escaped character"),
    ],
)
def test_an_output_folder_that_is_misread_is_refused(folder: str, elsewhere: str, meaning: str) -> None:
    error = refusal(f"output={folder}")
    assert (error.key, error.value) == ("output", folder)
    assert meaning in error.allowed
    assert str(parse(f"output={folder}", elsewhere).output) == folder


def test_a_relative_output_folder_is_checked_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    assert refusal().value == str(tmp_path / "a,b/runs")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("asynchrony.pause_mode", ["asynchrony.max_staleness=0", "asynchrony.pause_mode=abort"]),
        ("asynchrony.pause_mode", ["asynchrony.staleness_threshold=0", "asynchrony.pause_mode=keep"]),
        ("asynchrony.staleness_threshold", ["asynchrony.staleness_threshold=1.5"]),
        (
            "asynchrony.staleness_threshold",
            ["asynchrony.staleness_threshold=3", "asynchrony.max_staleness=2", "asynchrony.staleness_strategy=wait"],
        ),
        ("asynchrony.staleness_strategy", ["asynchrony.staleness_strategy=mask", "asynchrony.partial_rollout=false"]),
        ("asynchrony.staleness_strategy", ["asynchrony.staleness_strategy=mask", "asynchrony.pause_mode=wait"]),
        ("sync.full_every", ["sync.full_every=5"]),
        ("evaluation.max_prompts", ["evaluation.max_prompts=5"]),
        ("rewards.0.weight", ["rewards.0.weight=0"]),
        ("kubernetes.gpu_hours", [*ON_KUBERNETES, "kubernetes.gpu_resource=null", "kubernetes.gpu_hours=3"]),
        ("kubernetes.env.TIDEMILL_ATTEMPT", [*ON_KUBERNETES, "kubernetes.env={TIDEMILL_ATTEMPT: '3'}"]),
        ("kubernetes.runtime_env.workingdir", [*ON_KUBERNETES, "kubernetes.runtime_env={workingdir: /a}"]),
        ("kubernetes.pages.dashboard", [*ON_KUBERNETES, "kubernetes.pages={dashboard: 'http://ray'}"]),
    ],
)
def test_a_setting_without_effect_is_refused_with_a_fix(key: str, overrides: list[str]) -> None:
    error = refusal(*overrides)
    assert (error.key, bool(error.fix)) == (key, True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["asynchrony.max_staleness=0", "asynchrony.pause_mode=wait"],
        ["asynchrony.max_staleness=0", "asynchrony.partial_rollout=false"],
        ["asynchrony.staleness_threshold=1"],
        ["asynchrony.staleness_threshold=1.5", "asynchrony.staleness_strategy=drop"],
        ["sync.full_every=5", "sync.transport=object_store"],
        ["asynchrony.staleness_strategy=mask", "asynchrony.pause_mode=abort"],
        ["sync.full_every=10"],
        ["queue.when_full=drop_oldest", "queue.capacity=31"],
        ["queue.when_full=drop_oldest", "asynchrony.staleness_strategy=drop"],
        ["kubernetes.gpu_resource=null", *ON_KUBERNETES],
        ["kubernetes.runtime_env={pip: [sympy], env_vars: {A: b}}", *ON_KUBERNETES],
    ],
)
def test_a_setting_with_an_effect_or_at_its_default_is_accepted(overrides: list[str]) -> None:
    parse(*overrides)


@pytest.mark.parametrize("setting", ["partial_rollout=false", "pause_mode=wait"])
def test_mask_without_partial_rollouts_is_refused_naming_both_settings(setting: str) -> None:
    error = refusal("asynchrony.staleness_strategy=mask", f"asynchrony.{setting}")
    assert f"asynchrony.{setting.partition('=')[0]}" in error.fix
    assert parse("asynchrony.staleness_strategy=mask").pause_mode == "keep"


def test_a_setting_for_the_other_kind_of_processor_gives_a_notice() -> None:
    rollout = parse("rollout.cpu_kv_cache_gib=4", "rollout.gpu_memory_utilization=0.5").rollout
    [on_gpus], [without] = other_processor(rollout, gpus=True), other_processor(rollout, gpus=False)
    assert on_gpus.startswith("rollout.cpu_kv_cache_gib = 4 has no effect")
    assert without.startswith("rollout.gpu_memory_utilization = 0.5 has no effect")
    plain = parse().rollout
    assert [*other_processor(plain, gpus=True), *other_processor(plain, gpus=False)] == []


def test_a_warm_up_that_does_not_end_in_the_run_is_told() -> None:
    short, long = (parse(f"trainer.warmup_steps={steps}", "asynchrony.require_batches=2", NEVER) for steps in (8, 80))
    assert [*notices(short)] == []
    [told] = notices(long)
    assert "more than the 8 optimizer steps" in told
    assert "ends at 10% of" in told


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (["rollout.max_new_tokens=32768"], "rollout.group_timeout_s = 600 cancels .* = 32768, unless .* 55 tokens/s"),
        (["rollout.group_timeout_s=3600"], "trainer.get_timeout_s = 1800 fails the run before .* = 3600"),
        (["rewards.0.timeout_s=900"], "rewards.0.timeout_s = 900 has no effect: .* rollout.group_timeout_s = 600"),
        (
            ["algorithm.clip_ratio_high=0.28", "algorithm.old_log_prob=version_start"],
            "algorithm.clip_ratio_high = 0.28 has no effect: .* the ratio is 1",
        ),
        (
            ["algorithm.dual_clip=null", "algorithm.old_log_prob=decoupled"],
            "algorithm.dual_clip = null has no effect: .* the ratio is 1",
        ),
        (["asynchrony.trigger_parameter_sync_step=4"], "asynchrony.trigger_parameter_sync_step = 4 with .* = 4: all"),
        (["trainer.ranks=32"], "trainer.ppo_mini_batch_size = 16 is less than trainer.ranks = 32"),
    ],
)
def test_setting_without_effect_or_with_a_late_one_is_told(overrides: list[str], beginning: str) -> None:
    [told] = notices(parse(NEVER, *overrides))
    assert re.match(beginning, told)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.max_new_tokens=8192"],
        ["rollout.max_new_tokens=32768", "rollout.group_timeout_s=3600", "trainer.get_timeout_s=7200"],
        ["algorithm.clip_ratio_high=0.28"],
        [*("algorithm.clip_ratio_high=0.28", "algorithm.old_log_prob=version_start"), "asynchrony.require_batches=2"],
        ["asynchrony.trigger_parameter_sync_step=2"],
    ],
)
def test_setting_with_an_effect_is_not_told(overrides: list[str]) -> None:
    assert [*notices(parse(NEVER, *overrides))] == []


def test_held_out_prompts_that_are_trained_are_told() -> None:
    assert [*notices(parse("data.held_out=h.jsonl", NEVER)), *notices(parse(NEVER))] == []
    [told] = notices(parse("data.held_out=a.jsonl", NEVER))
    assert told.startswith("data.held_out names the prompts of data.train")


def test_scores_that_are_never_due_are_told() -> None:
    def told(*overrides: str) -> list[str]:
        return [*notices(parse("data.held_out=h.jsonl", "trainer.steps=9", NEVER, *overrides))]

    fourth = "asynchrony.trigger_parameter_sync_step=4"
    assert told() == told("evaluation.every=9") == told("evaluation.every=3", fourth) == []
    [text] = told("evaluation.every=4", fourth)
    assert text.startswith("evaluation.every = 4 is more than the 3 policy versions of the run")


def test_checkpoints_that_are_never_due_before_the_end_are_told() -> None:
    def told(*overrides: str) -> list[str]:
        return [*notices(parse("trainer.steps=12", *overrides))]

    assert told("checkpoint.every=12") == told(NEVER) == []
    [text] = told("asynchrony.trigger_parameter_sync_step=4", "checkpoint.every=4")
    assert text.startswith("checkpoint.every = 4 is more than the 3 policy versions of the run")


@pytest.mark.parametrize(
    ("rewards", "most"),
    [
        ("[{function: exact_number}]", 1.0),
        ("[{function: exact_number, weight: 2}, {function: overlong}]", 2.0),
        ("[{function: math_verify, weight: -1}, {function: reasoning_gym, weight: 0.5}]", 0.5),
        ("[{function: overlong, weight: -1}]", math.inf),
        ("[{function: exact_number}, {function: 'mine:own'}]", math.inf),
    ],
)
def test_a_score_that_the_rewards_cannot_give_is_refused(rewards: str, most: float) -> None:
    settings = ("data.held_out=h.jsonl", f"rewards={rewards}")
    assert parse(*settings, f"registry.min_score={min(most, 1e6)}").registry.min_score == min(most, 1e6)
    if most < math.inf:
        error = refusal(*settings, "registry.min_score=95")
        assert (error.key, error.allowed) == (
            "registry.min_score",
            f"at most {most:g}, the largest reward of these functions",
        )


def test_the_bounds_of_every_built_in_reward_are_known() -> None:
    assert BOUNDS.keys() == BUILT_IN.keys()
