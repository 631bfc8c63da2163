from __future__ import annotations

import math

import pytest
from config_rig import ON_KUBERNETES, parse, refusal

from tidemill.config.kubernetes_validation import RUNTIME_ENVIRONMENT
from tidemill.config.validation import BOUNDS, notices, other_processor
from tidemill.rollout.rewards import BUILT_IN

NEVER = "checkpoint.every=0"  # no notice of checkpoints


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
def test_a_setting_without_effect_is_refused_with_what_takes_it_away(key: str, overrides: list[str]) -> None:
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
        ["kubernetes.gpu_resource=null", *ON_KUBERNETES],
        ["kubernetes.runtime_env={pip: [sympy], env_vars: {A: b}}", *ON_KUBERNETES],
    ],
)
def test_what_holds_beside_the_others_or_is_the_default_is_taken(overrides: list[str]) -> None:
    parse(*overrides)


@pytest.mark.parametrize("setting", ["partial_rollout=false", "pause_mode=wait"])
def test_mask_without_partial_rollouts_is_told_which_setting_to_leave_out(setting: str) -> None:
    error = refusal("asynchrony.staleness_strategy=mask", f"asynchrony.{setting}")
    assert f"asynchrony.{setting.partition('=')[0]}" in error.fix
    assert parse("asynchrony.staleness_strategy=mask").pause_mode == "keep"


def test_the_keys_of_a_runtime_environment_are_those_that_ray_reads() -> None:
    from ray.runtime_env import RuntimeEnv

    of_ray_itself = {"_ray_release", "_ray_commit", "_inject_current_ray"}
    assert {name.lstrip("_") for name in RuntimeEnv.known_fields - of_ray_itself} == set(RUNTIME_ENVIRONMENT)


def test_a_key_of_the_store_in_the_settings_is_refused_without_being_shown() -> None:
    error = refusal(*ON_KUBERNETES, "kubernetes.env={TIDEMILL_S3_SECRET_KEY: abracadabra}")
    assert "kubernetes.store_secret" in str(error)
    assert "abracadabra" not in str(error)


@pytest.mark.parametrize("key", ["kubernetes.env", "kubernetes.runtime_env.env_vars"])
def test_a_secret_in_the_settings_is_refused_without_being_shown(key: str) -> None:
    error = refusal(*ON_KUBERNETES, f"{key}={{A: b, HF_TOKEN: abracadabra}}")
    assert error.key == f"{key}.HF_TOKEN" and "kubernetes.secrets" in error.fix
    assert "abracadabra" not in str(error)
    parse(*ON_KUBERNETES, f"{key}={{TOKENIZERS_PARALLELISM: 'false', KEY_ROTATION: 'on'}}")


def test_one_file_may_serve_machines_with_gpus_and_without_and_is_told_what_each_leaves_out() -> None:
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
