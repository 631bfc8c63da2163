"""What becomes of every setting of verl's fully asynchronous trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Becomes:
    """Has a counterpart.

    Attributes:
        key: of ours.
        convert: the value; None leaves ours out; raises ValueError, with what is allowed, for what has no counterpart.
    """

    key: str
    convert: Convert = lambda value: value


@dataclass(frozen=True, slots=True)
class Only:
    """Has one meaning here, and must have that there.

    Attributes:
        values: that mean the same.
        why: others cannot be taken over.
    """

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Changes nothing of what is learned, or is always so here.

    Attributes:
        why: it is left out.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Part:
    """Makes one of our settings together with others: see `convert.combined`.

    Attributes:
        key: of ours.
        kinds: types that the value may have.
        words: that the value may be, instead of a number.
    """

    key: str
    kinds: tuple[type[int] | type[float], ...] = (int,)
    words: tuple[str, ...] = ()


NUMBER, FLAG = (int, float), (bool,)
Rule = Becomes | Only | LeftOut | Part


def single_file(value: Any) -> str:
    """One file of a list of one."""
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        raise ValueError("one file")
    return str(files[0])


def one_of(table: Mapping[Any, Any]) -> Convert:
    """A value by name."""

    def convert(value: Any) -> Any:
        if value not in table:
            raise ValueError(" or ".join(map(str, table)))
        return table[value]

    return convert


def frequency(value: Any) -> int:
    """Never is -1 in verl, and 0 here."""
    return max(0, int(value))


def slug(value: Any) -> str:
    """A name as ours may be."""
    return re.sub("[^a-z0-9]+", "-", str(value).lower()).strip("-")[:63].strip("-") or "run"


MEMORY = "how memory is shared out; ranks always share the parameters (FSDP2) and pack by tokens"
ENGINE = "vLLM's own affair, which changes no result"
OUTPUT = "runs, logs and checkpoints have places of their own: output, tracking, store"
LOADER = "prompts are read, rendered and shuffled without a loader of verl's kind"
SYNC = "one host shares memory: sync.transport"

RECOMPUTED = "take it out; algorithm.rollout_correction.bypass_mode=False has old log-probs computed by the trainer"

RULES: Mapping[str, Rule] = {
    "async_training.staleness_threshold": Part("asynchrony.staleness_threshold, asynchrony.max_staleness", NUMBER),
    "async_training.trigger_parameter_sync_step": Becomes("asynchrony.trigger_parameter_sync_step"),
    "async_training.require_batches": Becomes("asynchrony.require_batches"),
    "async_training.partial_rollout": Part("asynchrony.partial_rollout", FLAG),
    "async_training.concurrent_samples_per_replica": Becomes("rollout.concurrent_samples_per_replica"),
    "async_training.use_rollout_log_probs": Only((True,), RECOMPUTED),
    "async_training.compute_prox_log_prob": Part("algorithm.old_log_prob", FLAG),
    "async_training.compute_advantage_in_rollout": LeftOut("advantages are computed by the trainer"),
    "async_training.use_trainer_do_validate": LeftOut("held-out prompts are scored by the engines of the run"),
    "async_training.use_dynamic_resource_scheduling": Only((False,), "GPUs are not lent between trainer and engines"),
    "async_training.dynamic_schedule_policy": LeftOut("without dynamic scheduling it says nothing"),
    "async_training.dynamic_schedule_deactivate_ratio": LeftOut("without dynamic scheduling it says nothing"),
    "async_training.dynamic_schedule_enable_rebalance": LeftOut("without dynamic scheduling it says nothing"),
    "rollout.nnodes": Part("rollout.engines"),
    "rollout.n_gpus_per_node": Part("rollout.engines"),
    "rollout.n": Part("rollout.group_size"),
    "rollout.total_rollout_steps": Becomes("rollout.total_rollout_steps"),
    "rollout.total_epochs": Becomes("data.epochs"),
    "rollout.test_freq": Becomes("evaluation.every", frequency),
    "data.train_files": Becomes("data.train", single_file),
    "data.val_files": Becomes("data.held_out", single_file),
    "data.prompt_key": Becomes("data.prompt_key"),
    "data.max_prompt_length": Becomes("data.max_prompt_tokens"),
    "data.max_response_length": Becomes("rollout.max_new_tokens"),
    "data.train_batch_size": Only((0,), "groups stream one by one"),
    "data.gen_batch_size": Only((1,), "groups stream one by one"),
    "data.val_batch_size": LeftOut("the engines take as many as fit"),
    "data.shuffle": Becomes("data.shuffle"),
    "data.seed": Becomes("seed"),
    "data.truncation": LeftOut("a prompt longer than data.max_prompt_tokens is skipped and counted, never cut"),
    "data.filter_overlong_prompts": LeftOut("a prompt longer than data.max_prompt_tokens is skipped and counted"),
    "data.filter_overlong_prompts_workers": LeftOut(LOADER),
    "data.return_raw_chat": LeftOut(LOADER),
    "data.dataloader_num_workers": LeftOut(LOADER),
    "data.reward_fn_key": LeftOut("rewards are named in `rewards`, not by a column"),
    "data.trust_remote_code": Only((False,), "code that comes with a model is not run"),
    "actor_rollout_ref.hybrid_engine": Only((False,), "trainer and engines are apart"),
    "actor_rollout_ref.model.path": Becomes("model"),
    "actor_rollout_ref.model.use_remove_padding": LeftOut("groups are always packed"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Becomes("trainer.gradient_checkpointing"),
    "actor_rollout_ref.model.trust_remote_code": Only((False,), "code that comes with a model is not run"),
    "actor_rollout_ref.model.lora_rank": Only((0,), "all weights are trained"),
    "actor_rollout_ref.model.use_fused_kernels": LeftOut(ENGINE),
    "actor_rollout_ref.model.use_liger": LeftOut(ENGINE),
    "actor_rollout_ref.actor.strategy": Only(("fsdp", "fsdp2"), "the trainer has FSDP2 only"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Becomes("trainer.ppo_mini_batch_size"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": LeftOut(MEMORY),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": LeftOut(MEMORY),
    "actor_rollout_ref.actor.use_dynamic_bsz": LeftOut("micro-batches are always filled by tokens"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Becomes("trainer.micro_batch_tokens"),
    "actor_rollout_ref.actor.ppo_epochs": Only((1,), "a group is trained once"),
    "actor_rollout_ref.actor.clip_ratio": Only((0.2,), "verl reads clip_ratio_low and clip_ratio_high; set those"),
    "actor_rollout_ref.actor.clip_ratio_low": Becomes("algorithm.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Becomes("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Becomes("algorithm.dual_clip"),
    "actor_rollout_ref.actor.loss_agg_mode": Becomes(
        "algorithm.aggregation", one_of({"token-mean": "token", "seq-mean-token-mean": "sequence"})
    ),
    "actor_rollout_ref.actor.entropy_coeff": Only((0,), "there is no entropy bonus"),
    "actor_rollout_ref.actor.use_kl_loss": Part("algorithm.kl_coef", FLAG),
    "actor_rollout_ref.actor.kl_loss_coef": Part("algorithm.kl_coef", NUMBER),
    "actor_rollout_ref.actor.kl_loss_type": Only(("low_var_kl", "k3"), "KL is estimated by k3"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Only(("vanilla",), "the loss is the clipped surrogate"),
    "actor_rollout_ref.actor.use_rollout_log_probs": Only((True,), RECOMPUTED),
    "actor_rollout_ref.actor.grad_clip": Becomes("trainer.max_grad_norm"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": LeftOut(MEMORY),
    "actor_rollout_ref.actor.use_torch_compile": LeftOut(MEMORY),
    "actor_rollout_ref.actor.optim.lr": Becomes("trainer.learning_rate"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Becomes("trainer.warmup_steps", frequency),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": Only((0,), "set lr_warmup_steps"),
    "actor_rollout_ref.actor.optim.weight_decay": Becomes("trainer.weight_decay"),
    "actor_rollout_ref.actor.optim.warmup_style": Only(("constant",), "the rate is constant after warm-up"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Only(("constant",), "the rate is constant after warm-up"),
    "actor_rollout_ref.actor.optim.total_training_steps": LeftOut("the rate is constant after warm-up"),
    "actor_rollout_ref.rollout.name": Only(("vllm",), "engines are vLLM"),
    "actor_rollout_ref.rollout.mode": Only(("async",), "engines take requests one by one"),
    "actor_rollout_ref.rollout.n": Part("rollout.group_size"),
    "actor_rollout_ref.rollout.temperature": Becomes("rollout.temperature"),
    "actor_rollout_ref.rollout.top_p": Only((1,), "truncated sampling biases the ratio; set 1.0"),
    "actor_rollout_ref.rollout.top_k": Only((-1, 0), "truncated sampling biases the ratio; set -1"),
    "actor_rollout_ref.rollout.ignore_eos": Only((False,), "the end-of-sequence token ends a response"),
    "actor_rollout_ref.rollout.do_sample": Only((True,), "training rollouts are sampled"),
    "actor_rollout_ref.rollout.calculate_log_probs": Only((True,), "every token carries its log-prob"),
    "actor_rollout_ref.rollout.dtype": Becomes(
        "rollout.dtype", one_of({"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"})
    ),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Becomes("rollout.tensor_parallel_size"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Becomes("rollout.gpu_memory_utilization"),
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization": Part("rollout.gpu_memory_utilization", NUMBER),
    "actor_rollout_ref.rollout.multi_turn.enable": Only((False,), "responses have one turn"),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": LeftOut(SYNC),
    "algorithm.adv_estimator": Only(("grpo",), "advantages are group-relative"),
    "algorithm.norm_adv_by_std_in_grpo": Becomes("algorithm.normalize_std"),
    "algorithm.use_kl_in_reward": Only((False,), "KL stands in the loss: set use_kl_loss"),
    "algorithm.kl_ctrl.kl_coef": LeftOut("KL does not stand in the reward"),
    "algorithm.gamma": LeftOut("GRPO has no discount"),
    "algorithm.lam": LeftOut("GRPO has no critic"),
    "algorithm.filter_groups.enable": Only((False,), "groups without variance stay in their batch and cost nothing"),
    "algorithm.rollout_correction.bypass_mode": Part("algorithm.old_log_prob", FLAG),
    "algorithm.rollout_correction.loss_type": Only(("ppo_clip",), "the loss is the clipped surrogate"),
    "algorithm.rollout_correction.rollout_is": Part("algorithm.old_log_prob", words=("token",)),
    "algorithm.rollout_correction.rollout_is_threshold": Part("algorithm.behaviour_cap", NUMBER),
    "algorithm.rollout_correction.rollout_is_batch_normalize": Only((False,), "weights are truncated, not normalised"),
    "algorithm.rollout_correction.rollout_rs": Only((None,), "no token is rejected"),
    "algorithm.rollout_correction.rollout_rs_threshold": LeftOut("without rollout_rs it says nothing"),
    "reward_model.enable": Only((False,), "rewards are functions"),
    "reward_model.reward_manager": LeftOut("functions are named in `rewards`"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": Only(
        (False,), "write a function that takes length into account"
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": LeftOut("without the overlong buffer it says nothing"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": LeftOut("as above"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": LeftOut("as above"),
    "reward_model.reward_kwargs.max_resp_len": LeftOut("the overlong buffer's"),
    "custom_reward_function.path": Only((None,), "name a function `package.module:function` in `rewards` yourself"),
    "custom_reward_function.name": LeftOut("functions are named in `rewards`"),
    "trainer.experiment_name": Becomes("name", slug),
    "trainer.project_name": Becomes("tracking.experiment", str),
    "trainer.nnodes": Part("trainer.ranks"),
    "trainer.n_gpus_per_node": Part("trainer.ranks"),
    "trainer.total_epochs": Becomes("data.epochs"),
    "trainer.total_training_steps": Only((None,), "steps follow from rollout.total_rollout_steps"),
    "trainer.test_freq": Becomes("evaluation.every", frequency),
    "trainer.save_freq": Becomes("checkpoint.every", frequency),
    "trainer.max_actor_ckpt_to_keep": Becomes("checkpoint.keep"),
    "trainer.resume_mode": Becomes("checkpoint.resume", one_of({"auto": "auto", "disable": "never"})),
    "trainer.val_before_train": LeftOut("held-out prompts are always scored before training"),
    "trainer.val_only": Only((False,), "use tidemill evaluate"),
    "trainer.critic_warmup": Only((0,), "there is no critic"),
    "trainer.balance_batch": LeftOut("rows are always shared out evenly"),
    "trainer.logger": LeftOut("MLflow always has everything"),
    "trainer.log_val_generations": LeftOut("all answers stand in MLflow"),
    "trainer.default_local_dir": LeftOut(OUTPUT),
    "trainer.device": LeftOut("the device is found"),
}
PREFIXES: Mapping[str, LeftOut] = {
    "critic.": LeftOut("GRPO has no critic"),
    "ray_kwargs.": LeftOut("cluster.provider says where Ray comes from"),
    "ray_init.": LeftOut("cluster.provider says where Ray comes from"),
    "async_training.checkpoint_engine.": LeftOut(SYNC),
    "actor_rollout_ref.ref.": LeftOut("the reference is computed with the policy's settings"),
    "actor_rollout_ref.actor.fsdp_config.": LeftOut(MEMORY),
    "actor_rollout_ref.actor.checkpoint.": LeftOut("a checkpoint always holds all that a restart needs"),
    "actor_rollout_ref.rollout.checkpoint_engine.": LeftOut(SYNC),
    "actor_rollout_ref.rollout.log_prob_": LeftOut("the trainer computes log-probs with its own settings"),
    "actor_rollout_ref.rollout.val_kwargs.": LeftOut("held-out prompts are answered greedily, once each"),
    "actor_rollout_ref.rollout.agent.": LeftOut("one rollouter serves all engines"),
    "actor_rollout_ref.rollout.multi_turn.": LeftOut("responses have one turn"),
    "actor_rollout_ref.rollout.engine_kwargs.": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.enable_": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.enforce_eager": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.free_cache_engine": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.load_format": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.max_num_": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.max_model_len": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.disable_log_stats": LeftOut(ENGINE),
}

# What verl's files say where a script says nothing, as far as it differs from ours or must be looked at.
DEFAULTS: Mapping[str, Any] = {
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.partial_rollout": True,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "rollout.total_rollout_steps": 100,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "algorithm.adv_estimator": "gae",
    "trainer.experiment_name": "gsm8k",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
}


def rule_of(key: str) -> Rule | None:
    """The rule for a key of verl; None for one that is not known here."""
    if key in RULES:
        return RULES[key]
    return next((rule for prefix, rule in PREFIXES.items() if key.startswith(prefix)), None)
