"""A verl command becomes a run file; every setting is converted, listed or refused."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.main import main
from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig, fields
from tidemill.errors import ConfigError
from tidemill.verl.convert import convert
from tidemill.verl.hydra import read_settings
from tidemill.verl.rules import RULES, UNLIKE, Becomes, Part, rule_of

SCRIPT = Path(__file__).with_name("math_7b_async.sh")
PAGE = Path(__file__).parents[2] / "docs/from_verl.md"
SMALL = [
    "actor_rollout_ref.model.path=m",
    "data.train_files=a.parquet",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "rollout.total_rollout_steps=1024",
]
HOME = {"HOME": "/home/me"}


def config(*overrides: str, settings: Sequence[str] = ()) -> RunConfig:
    return parse_config(convert([*SMALL, *overrides], settings, HOME))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        convert([*SMALL, *overrides], [], {})
    return str(caught.value)


def shell_words(script: str, folder: Path, command: str = "python3 -m verl.main") -> list[str]:
    """What the shell passes to the command that takes the place of verl's `command` in a script."""
    assert command in script
    (folder / "script.sh").write_text(script.replace(command, "printf '%s\\0'"), encoding="utf-8")
    environment = HOME | {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "script.sh"], check=True, capture_output=True, cwd=folder, env=environment)
    return done.stdout.decode().split("\0")[:-1]


def example_words(folder: Path) -> list[str]:
    command = "ray job submit -- python3 -m verl.experimental.fully_async_policy.fully_async_main"
    return shell_words(SCRIPT.read_text(encoding="utf-8"), folder, command)


@pytest.mark.parametrize(
    ("before", "word", "key", "value"),
    [
        ("n=8; (( n *= 2 ))", "actor_rollout_ref.rollout.n=$n", "rollout.group_size", 16),
        ("p=1; unset p; p=${p:-2048}", "data.max_prompt_length=$p", "data.max_prompt_tokens", 2048),
        ("printf -v lr '%s' 5e-7", "actor_rollout_ref.actor.optim.lr=$lr", "trainer.learning_rate", 5e-7),
        ("IFS=, read -r a b <<< 'm,1024'", "data.max_response_length=$b", "rollout.max_new_tokens", 1024),
        ("", "data.max_prompt_length=$((2 ** 10))", "data.max_prompt_tokens", 1024),
        ("f=/d/a.parquet", "data.val_files=${f%.parquet}_x.parquet", "data.held_out", "/d/a_x.parquet"),
        ("f=x", "data.prompt_key=${f:+question}", "data.prompt_key", "question"),
        ("N=ABC", "trainer.experiment_name=${N,,}", "name", "abc"),
        ("a=(x y); a+=(trainer.project_name=p)", "${a[2]}", "tracking.experiment", "p"),
    ],
)
def test_the_shell_expands_the_settings(before: str, word: str, key: str, value: object, tmp_path: Path) -> None:
    found = config(*shell_words(f"{before}\npython3 -m verl.main {word}\n", tmp_path)).model_dump()
    for name in key.split("."):
        found = found[name]
    assert found == value


def test_the_example_script_becomes_the_run_that_it_describes(tmp_path: Path) -> None:
    run = parse_config(convert(example_words(tmp_path), [], HOME))
    assert (run.name, run.model) == ("math-7b-async", "/home/me/verl/models/Qwen2.5-Math-7B")
    assert (run.data.train, run.data.answer_key) == ("/home/me/verl/data/math.parquet", "reward_model.ground_truth")
    a = run.asynchrony
    assert (a.staleness_threshold, a.max_staleness, a.trigger_parameter_sync_step, a.require_batches) == (0.5, 1, 4, 2)
    assert (a.partial_rollout, run.pause_mode) == (True, "keep")
    assert run.trainer.steps == 51200 // (32 * 2) == 800
    assert run.max_groups_between_syncs == int(1.5 * 4 * 2 * 32)
    assert (run.rollout.engines, run.rollout.tensor_parallel_size, run.trainer.ranks) == (3, 4, 4)
    assert (run.algorithm.kl_loss_coef, run.algorithm.clip_ratio_high, run.algorithm.dual_clip) == (0.01, 0.28, 10.0)
    assert run.trainer.micro_batch_tokens == (2048 + 8192) * 2


def test_every_setting_of_the_script_is_converted_or_listed_unless_it_is_a_default(tmp_path: Path) -> None:
    keys = [word.partition("=")[0] for word in example_words(tmp_path) if not word.startswith("--")]
    printed = convert(example_words(tmp_path), [], HOME)
    defaults = read_settings([], None, {})[1]
    given = read_settings(example_words(tmp_path), None, HOME)[0]
    listed = [key for key in keys if f"#   {key} = " in printed]
    converted = [key for key in keys if isinstance(rule_of(key), Becomes | Part)]
    silent = [key for key in keys if key not in listed + converted and given[key] == defaults[key]]
    assert len(keys) > 40 and len(silent) < 8
    assert sorted(listed + converted + silent) == sorted(keys)


def test_a_setting_that_is_not_given_has_the_default_of_verl() -> None:
    run = config()
    assert (run.asynchrony.staleness_threshold, run.asynchrony.trigger_parameter_sync_step) == (0.1, 4)
    assert (run.trainer.ppo_mini_batch_size, run.trainer.weight_decay) == (256, 0.01)
    assert (run.algorithm.kl_loss_coef, run.algorithm.old_log_prob, run.checkpoint.every) == (0, "rollout", 0)
    assert (run.trainer.ranks, run.rollout.engines, run.trainer.gradient_checkpointing) == (8, 4, True)
    assert "algorithm.adv_estimator = gae (verl's default)" in refusal("~algorithm.adv_estimator")


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("actor_rollout_ref.actor.clip_ratio_low=0.1", "algorithm.clip_ratio_low", 0.1),
        ("actor_rollout_ref.actor.clip_ratio_high=0.3", "algorithm.clip_ratio_high", 0.3),
        ("actor_rollout_ref.actor.clip_ratio_c=5", "algorithm.dual_clip", 5.0),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "algorithm.aggregation", "token"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "algorithm.aggregation", "sequence"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "algorithm.aggregation", "sequence_sum"),
        ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.normalize_std", False),
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl_loss_coef", 0.001),
        ("actor_rollout_ref.actor.kl_loss_coef=0.5", "algorithm.kl_loss_coef", 0.0),
        ("actor_rollout_ref.actor.optim.lr=3e-6", "trainer.learning_rate", 3e-6),
        ("actor_rollout_ref.actor.optim.weight_decay=0.2", "trainer.weight_decay", 0.2),
        ("actor_rollout_ref.actor.grad_clip=0.5", "trainer.max_grad_norm", 0.5),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "trainer.max_grad_norm", 0.5),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.precision", "float32"),
        ("trainer.nnodes=3", "trainer.ranks", 24),
        ("rollout.nnodes=3", "rollout.engines", 12),
        ("actor_rollout_ref.rollout.temperature=0.8", "rollout.temperature", 0.8),
        ("actor_rollout_ref.rollout.dtype=float32", "rollout.dtype", "float32"),
        ("actor_rollout_ref.rollout.standalone_gpu_memory_utilization=0.7", "rollout.gpu_memory_utilization", 0.7),
        ("data.max_prompt_length=100", "data.max_prompt_tokens", 100),
        ("data.max_response_length=100", "rollout.max_new_tokens", 100),
        ("data.shuffle=False", "data.shuffle", False),
        ("data.seed=7", "seed", 7),
        ("trainer.save_freq=5", "checkpoint.every", 5),
        ("trainer.resume_mode=disable", "checkpoint.resume", "never"),
    ],
)
def test_a_setting_with_a_counterpart_is_converted(setting: str, key: str, value: object) -> None:
    found = config(setting).model_dump()
    for name in key.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    ("threshold", "partial", "mode"), [("0", "True", "keep"), ("0.5", "False", "wait"), ("0.5", "True", "keep")]
)
def test_the_pipeline_modes_of_verl_are_converted(threshold: str, partial: str, mode: str) -> None:
    run = config(f"async_training.staleness_threshold={threshold}", f"async_training.partial_rollout={partial}")
    assert (run.pause_mode, run.synchronous) == (mode, threshold == "0")


@pytest.mark.parametrize(("size", "synchronous"), [(2, True), (3, False)])
def test_a_threshold_below_one_group_is_synchronous_as_in_verl(size: int, synchronous: bool) -> None:
    """verl rounds down, too: int(2 * 4 * 1.1) is 8, int(3 * 4 * 1.1) is 13."""
    run = config(f"actor_rollout_ref.actor.ppo_mini_batch_size={size}")
    assert (run.synchronous, run.max_groups_between_syncs) == (synchronous, 8 if synchronous else 13)
    assert run.asynchrony.partial_rollout is (None if synchronous else True)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "only 1; truncated sampling"),
        ("actor_rollout_ref.rollout.name=sglang", "only vllm"),
        ("actor_rollout_ref.actor.strategy=megatron", "only fsdp or fsdp2"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "only token-mean or seq-mean-token-mean"),
        ("actor_rollout_ref.actor.entropy_coeff=0.001", "there is no entropy bonus"),
        ("algorithm.rollout_correction.rollout_is=token", "only with bypass_mode=False"),
        ("algorithm.rollout_correction.rollout_is=batch", "only token or sequence"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_5.0", "only a number of at least 0"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize=True", "truncated, not normalised"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "no token is rejected"),
        ("algorithm.rollout_correction.bypass_mode=maybe", "only True or False"),
        ("actor_rollout_ref.actor.use_rollout_log_probs=False", "bypass_mode=False"),
        ("algorithm.filter_groups.enable=True", "only False"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.enable=maybe", "only True or False"),
        ("+actor_rollout_ref.model.override_config.max_position_embeddings=32768", "own config.json"),
        ("trainer.total_epochs=${now:%j}", "only Hydra can tell"),
        ("trainer.nnodes=many", "only a number"),
        ("async_training.partial_rollout=1", "only True or False"),
        ("async_training.staleness_threshold=-0.5", "only a number of at least 0"),
        ("async_training.nonsense=1", "not known"),
        ("model_engine=megatron", "only dp"),
        ("trainer.v1.sampler.max_off_policy_threshold=4", "V1 trainer"),
        ("actor_rollout_ref.actor.megatron.param_offload=True", "data-parallel"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16", "are float32"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=True", "weights as they are"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32", "fsdp_config.dtype"),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "its own router"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", "only null or auto"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm={kv_cache_dtype: fp8}", "only null or auto"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8", "weights as they are"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_theta=1000000", "own config.json"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors=[a.b]", "the distribution"),
        ("actor_rollout_ref.rollout.data_parallel_size=2", "tensor-parallel only"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=0", "a divisor of the 8 GPUs"),
        ("async_training.trigger_parameter_sync_step=null", "only a value"),
        ("actor_rollout_ref.actor.clip_ratio_high=null", "only a value"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=null", "only a number of at least 0"),
        ("async_training.staleness_threshold=inf", "only a number of at least 0"),
        ("data.train_files=['a.parquet','b.parquet']", "only one file: put the rows of all files into one"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused_by_name(setting: str, why: str) -> None:
    message = refusal(setting)
    assert setting.lstrip("+").partition("=")[0] in message
    assert why in message


def test_all_refused_settings_are_named_at_once_and_can_be_replaced_or_taken_out() -> None:
    overrides = ("algorithm.gae=1", "actor_rollout_ref.rollout.top_k=20")
    message = refusal(*overrides)
    named = ("2 settings without a counterpart", "algorithm.gae = 1", "actor_rollout_ref.rollout.top_k = 20")
    assert all(part in message for part in named)
    assert config(*overrides, "~algorithm.gae", "actor_rollout_ref.rollout.top_k=-1").model == "m"


@pytest.mark.parametrize(
    ("settings", "mode", "cap"),
    [
        ([], "rollout", 2.0),
        (["bypass_mode=True", "rollout_is_threshold=5.0"], "rollout", 2.0),
        (["bypass_mode=False"], "version_start", 2.0),
        (["bypass_mode=null"], "version_start", 2.0),
        (["bypass_mode=False", "rollout_is=null", "rollout_is_threshold=5.0"], "version_start", 2.0),
        (["bypass_mode=False", "rollout_is=token"], "decoupled", 2.0),
        (["bypass_mode=False", "rollout_is=token", "rollout_is_threshold=5.0"], "decoupled", 5.0),
    ],
)
def test_corrections_of_verl_choose_the_old_log_probs(settings: list[str], mode: str, cap: float) -> None:
    algorithm = config(*(f"algorithm.rollout_correction.{setting}" for setting in settings)).algorithm
    assert (algorithm.old_log_prob, algorithm.proximal, algorithm.rollout_correction.rollout_is_threshold) == (
        mode,
        "exact",
        cap,
    )


def test_the_earlier_name_of_computed_log_probs_is_understood() -> None:
    assert config("async_training.compute_prox_log_prob=True").algorithm.old_log_prob == "version_start"


def test_a_step_of_several_mini_batches_has_as_many_optimizer_steps_as_in_verl() -> None:
    """verl, too, takes 4 * 32 groups at once, makes 4 optimizer steps of 32, and then moves its learning rate on."""
    run = config(
        "async_training.require_batches=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "async_training.trigger_parameter_sync_step=2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    )
    assert (run.trainer.steps, run.required_samples, run.updates_per_version) == (8, 128, 8)
    assert run.trainer.warmup_steps == 40
    assert config("actor_rollout_ref.actor.optim.lr_warmup_steps=-1").trainer.warmup_steps == 0


def test_a_group_is_as_large_as_verl_makes_it() -> None:
    assert config("actor_rollout_ref.rollout.n=16", "rollout.n=4").rollout.group_size == 16
    with pytest.raises(ConfigError, match=r"^rollout\.group_size = 1"):
        config("~actor_rollout_ref.rollout.n", "rollout.n=4")
    assert config("algorithm.adv_estimator=reinforce_plus_plus", "~actor_rollout_ref.rollout.n").rollout.group_size == 1


def test_the_number_of_epochs_is_that_of_verl() -> None:
    assert config().data.epochs == 30
    assert config("rollout.total_epochs=10").data.epochs == config("trainer.total_epochs=10").data.epochs == 10
    assert "data.epochs = 5" in refusal("trainer.total_epochs=5", "rollout.total_epochs=10")


@pytest.mark.parametrize("place", ["reward_model", "reward"])
def test_rewards_are_read_where_earlier_and_later_versions_of_verl_have_them(place: str) -> None:
    kwargs = f"{place}.reward_kwargs"
    overlong = f"{kwargs}.overlong_buffer_cfg"
    off = config(f"{overlong}.enable=False", f"{overlong}.len=4096")
    assert [reward.function for reward in off.rewards] == ["math_verify"]
    given = (f"{overlong}.len=4096", f"{overlong}.penalty_factor=0.5", f"{kwargs}.max_resp_len=8192")
    on = config(f"{overlong}.enable=True", *given)
    assert [reward.function for reward in on.rewards] == ["math_verify", "overlong"]
    assert on.rewards[1].options == {"budget": 8192, "buffer": 4096, "penalty": 0.5}
    message = refusal("custom_reward_function.path=a.py")
    assert "custom_reward_function.path = a.py: only null; take it out, and name the function" in message


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("~reward.reward_kwargs.max_resp_len", "reward_kwargs.max_resp_len: not given, and needed"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=0", "len = 0: only from 1 to max_resp_len = 8192"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=9000", "len = 9000: only from 1 to max_resp_len = 8192"),
        ("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=big", "only a number of at least 0"),
    ],
)
def test_punishment_of_long_responses_needs_all_of_its_numbers(setting: str, why: str) -> None:
    kwargs = "reward.reward_kwargs"
    numbers = ("enable=True", "len=4096", "penalty_factor=1.0")
    given = [f"{kwargs}.max_resp_len=8192", *(f"{kwargs}.overlong_buffer_cfg.{number}" for number in numbers)]
    assert why in refusal(*given, setting)


@given(
    key=st.sampled_from([*(name.replace("*", "x") for name in RULES), "a.b"]),
    value=st.one_of(
        st.sampled_from(["", "null", "nan", "inf", "True", "[1]", "{a: 1}", "[a", "*a", "2024-13-45", "${a.b}", "-1"]),
        st.text(max_size=8),
    ),
)
def test_any_value_is_converted_listed_or_refused(key: str, value: str) -> None:
    try:
        printed = convert([*SMALL, f"{key}={value}"], [], {})
    except ConfigError:
        return
    assert parse_config(printed)


def test_a_setting_without_a_value_is_listed() -> None:
    printed = convert([*SMALL, "data.prompt_key=null"], [], {})
    assert "#   data.prompt_key = None: sets nothing" in printed
    assert parse_config(printed).data.prompt_key == config().data.prompt_key


def test_two_settings_that_contradict_each_other_are_refused() -> None:
    assert "evaluation.every = 5" in refusal("trainer.test_freq=5", "rollout.test_freq=6", "data.val_files=b.parquet")


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "data.train_files"])
@pytest.mark.parametrize("how", ["~{}", "{}=null"])
def test_model_and_data_must_be_given(key: str, how: str) -> None:
    assert f"{key}: not given" in refusal(how.format(key))


def test_a_run_has_an_end() -> None:
    assert "rollout.total_rollout_steps: needed as a number" in refusal("rollout.total_rollout_steps=null")


def test_gpus_for_rollout_must_divide_into_whole_engines() -> None:
    message = refusal("rollout.n_gpus_per_node=6", "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert "a divisor of the 6 GPUs" in message


def test_every_rule_names_an_existing_setting_of_tidemill() -> None:
    ours = {key for key, _, _ in fields()}
    named = [key for rule in RULES.values() if isinstance(rule, Becomes | Part) for key in rule.key.split(", ")]
    assert sorted(set(named) - ours) == []


def test_every_rule_is_on_the_page() -> None:
    page = PAGE.with_name("verl_settings.md").read_text(encoding="utf-8")
    assert [key for key in RULES if f"`{key}`" not in page] == []
    assert [key for key in UNLIKE if rule_of(key) is None] == []


def test_the_metrics_that_those_of_verl_are_compared_with_exist() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row[1])]
    documented = PAGE.with_name("metrics.md").read_text(encoding="utf-8")
    assert len(rows) > 10 and [name for name in named if f"`{name}`" not in documented] == []


def test_a_setting_at_the_default_of_verl_passes_silently() -> None:
    silent = ("actor_rollout_ref.rollout.repetition_penalty=1.0", "critic.strategy=fsdp", "trainer.use_v1=True")
    assert convert([*SMALL, *silent], [], {}) == convert(SMALL, [], {})
    assert "only 1; a penalty changes" in refusal("actor_rollout_ref.rollout.repetition_penalty=1.1")


def test_all_defaults_of_verl_written_out_make_the_same_run(tmp_path: Path) -> None:
    """As in the file that verl generates of its whole configuration."""
    tree = yaml.safe_load(files("tidemill.verl").joinpath("defaults.yaml").read_text(encoding="utf-8"))
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    printed = convert([*SMALL, "~data.val_files"], [], HOME, tmp_path / "verl.yaml")
    given, expected = parse_config(printed), config()
    assert (given.rollout.dtype, given.trainer.precision, given.evaluation.every) == ("bfloat16", "bfloat16", 0)
    set_by_the_file = {"rollout": {"dtype"}, "trainer": {"precision"}, "tracking": {"experiment"}}
    assert given.model_dump(exclude=set_by_the_file) == expected.model_dump(exclude=set_by_the_file)
    assert printed.partition("# Left out")[2].count("#   ") == 0


@pytest.mark.parametrize("place", ["", "reward."])
def test_arguments_of_a_reward_function_become_its_options(place: str) -> None:
    kwargs = f"+{place}custom_reward_function.reward_kwargs"
    run = config(f"{kwargs}.format_weight=0.5", f"{kwargs}.a.b=x", settings=["rewards.0.function=my_rewards:score"])
    assert run.rewards[0].function == "my_rewards:score"
    assert run.rewards[0].options == {"format_weight": 0.5, "a": {"b": "x"}}
    assert config(f"{kwargs}={{format_weight: 0.5}}").rewards[0].options == {"format_weight": 0.5}
    assert "rewards.0.function" in convert([*SMALL, f"{kwargs}.format_weight=0.5"], [], {})


def test_settings_of_tidemill_replace_what_the_command_says() -> None:
    run = config(settings=["trainer.learning_rate=2e-6", "cluster.provider=existing", "rollout.group_size=6"])
    assert (run.trainer.learning_rate, run.cluster.provider, run.rollout.group_size) == (2e-6, "existing", 6)
    with pytest.raises(ConfigError, match=r"^trainer\.setps"):
        config(settings=["trainer.setps=3"])


def test_the_command_prints_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {n: 16}}\ntrainer: {experiment_name: a}")
    options = ["--config-path=config", "--config-name", "fully_async_ppo_trainer.yaml", "--config"]
    assert (
        main(
            [
                "convert-verl",
                *options,
                str(tmp_path / "verl.yaml"),
                *SMALL,
                "trainer.experiment_name=other",
                "hydra.run.dir=x",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (yaml.safe_load(printed)["name"], yaml.safe_load(printed)["rollout"]["group_size"]) == ("other", 4)
    assert "# Left out of the verl command:" in printed
    assert main(["convert-verl", *SMALL, "--set", "name=mine", "--set", "rollout.group_size=8"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["name"] == "mine"
    assert main(["convert-verl", "--config", "missing.yaml"]) == 2
    assert main(["convert-verl", *SMALL, "data.train_batch_size=64"]) == 2
    assert "data.train_batch_size = 64: only 0" in capsys.readouterr().err
