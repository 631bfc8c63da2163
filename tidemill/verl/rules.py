"""What becomes of every setting of verl's fully asynchronous trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
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
class Never:
    """Has no counterpart, whatever its value is.

    Attributes:
        why: it has none, and what to do.
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
Rule = Becomes | Only | LeftOut | Never | Part


def positive(value: Any) -> int:
    """A number of things of which there is at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number from 1 on")
    return value


def group(value: Any) -> int:
    """Responses per prompt."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ValueError("a number from 2 on: an advantage is relative to the other responses of the group")
    return value


def single_file(value: Any) -> str:
    """One file of a list of one."""
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        raise ValueError("one file")
    return str(files[0])


def one_of(table: Mapping[Any, Any]) -> Convert:
    """A value by name."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Hashable) or value not in table:
            raise ValueError(" or ".join(map(str, table)))
        return table[value]

    return convert


def frequency(value: Any) -> int:
    """Never is -1 in verl, and 0 here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return max(0, value)


def limit(value: Any) -> int | None:
    """No limit is -1 in verl, and null here."""
    return frequency(value) or None


def slug(value: Any) -> str:
    """A name as ours may be."""
    return re.sub("[^a-z0-9]+", "-", str(value).lower()).strip("-")[:63].strip("-") or "run"


MEMORY = "how memory is shared out; ranks always share the parameters (FSDP2) and pack by tokens"
ENGINE = "vLLM's own affair, which changes no result"
OUTPUT = "runs, logs and checkpoints have places of their own: output, tracking, store"
LOADER = "prompts are read, rendered and shuffled without a loader of verl's kind"
SYNC = "one host shares memory: sync.transport"

KERNELS = "kernels of verl's trainer, which change no result"
OVERLONG = "without the overlong buffer it says nothing"
CLIPPED = "the loss is the clipped surrogate"
TEMPLATE = "prompts are rendered by the chat template that comes with the model: change it there"
ROWS = "prompts are the rows of a file, text only"
RENDERED = "MLflow has all metrics and answers"
WITHOUT = "it is off, so that the rest of its settings says nothing"
RECOMPUTED = "take it out; algorithm.rollout_correction.bypass_mode=False has old log-probs computed by the trainer"

OWN_REWARD = "name a function `package.module:function` in `rewards` yourself"
REWARD_KWARGS: Mapping[str, Rule] = {
    "reward_kwargs.overlong_buffer_cfg.enable": Only(
        (False,), "there is no such penalty: write a function that takes length into account"
    ),
    "reward_kwargs.overlong_buffer_cfg.len": LeftOut(OVERLONG),
    "reward_kwargs.overlong_buffer_cfg.penalty_factor": LeftOut(OVERLONG),
    "reward_kwargs.overlong_buffer_cfg.log": LeftOut(OVERLONG),
    "reward_kwargs.max_resp_len": LeftOut(OVERLONG),
    "sandbox_fusion.url": Only((None,), "reward functions call no sandbox: write one that does"),
}
OWN_FUNCTION: Mapping[str, Rule] = {
    "custom_reward_function.path": Only((None,), OWN_REWARD),
    "custom_reward_function.name": LeftOut("functions are named in `rewards`"),
}
# The same settings stand in other places in earlier and in later versions of verl.
REWARDS: Mapping[str, Mapping[str, Rule]] = {
    "": OWN_FUNCTION,
    "reward_model.": REWARD_KWARGS,
    "reward.": {**OWN_FUNCTION, **REWARD_KWARGS},
}
SETTINGS: Mapping[str, Rule] = {
    "async_training.staleness_threshold": Part("asynchrony.staleness_threshold, asynchrony.max_staleness", NUMBER),
    "async_training.trigger_parameter_sync_step": Becomes("asynchrony.trigger_parameter_sync_step", positive),
    "async_training.require_batches": Becomes("asynchrony.require_batches", positive),
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
    "rollout.n": LeftOut("verl reads actor_rollout_ref.rollout.n"),
    "rollout.total_rollout_steps": Becomes("rollout.total_rollout_steps"),
    "model_engine": Only(("dp",), "the trainer is data-parallel (FSDP2)"),
    "rollout.total_epochs": Becomes("data.epochs"),
    "rollout.test_freq": Becomes("evaluation.every", frequency),
    "data.train_files": Becomes("data.train", single_file),
    "data.val_files": Becomes("data.held_out", single_file),
    "data.prompt_key": Becomes("data.prompt_key"),
    "data.max_prompt_length": Becomes("data.max_prompt_tokens"),
    "data.max_response_length": Becomes("rollout.max_new_tokens"),
    "data.train_batch_size": Only(
        (0,),
        "groups stream; between two syncs ppo_mini_batch_size * require_batches * trigger_parameter_sync_step train",
    ),
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
    "data.train_max_samples": Only((-1,), "all rows are read: cut the file"),
    "data.val_max_samples": Becomes("evaluation.max_prompts", limit),
    "data.validation_shuffle": LeftOut(LOADER),
    "data.return_raw_input_ids": LeftOut(LOADER),
    "data.return_full_prompt": LeftOut(LOADER),
    "data.use_shm": LeftOut(LOADER),
    "data.return_multi_modal_inputs": LeftOut(LOADER),
    "data.tokenizer": Only((None,), "the tokenizer is the model's own"),
    "data.custom_cls.path": Only((None,), f"{ROWS}: write one"),
    "data.custom_cls.name": LeftOut("without custom_cls.path it says nothing"),
    "data.trust_remote_code": Only((False,), "code that comes with a model is not run"),
    "actor_rollout_ref.hybrid_engine": Only((False,), "trainer and engines are apart"),
    "actor_rollout_ref.model.path": Becomes("model"),
    "actor_rollout_ref.model.use_remove_padding": LeftOut("groups are always packed"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Becomes("trainer.gradient_checkpointing"),
    "actor_rollout_ref.model.trust_remote_code": Only((False,), "code that comes with a model is not run"),
    "actor_rollout_ref.nccl_timeout": LeftOut("waits have deadlines of their own, such as sync.timeout_s"),
    "actor_rollout_ref.model.lora_rank": Only((0,), "all weights are trained"),
    "actor_rollout_ref.model.lora_adapter_path": Only((None,), "all weights are trained"),
    "actor_rollout_ref.model.lora_alpha": LeftOut("without LoRA it says nothing"),
    "actor_rollout_ref.model.target_modules": LeftOut("without LoRA it says nothing"),
    "actor_rollout_ref.model.exclude_modules": LeftOut("without LoRA it says nothing"),
    "actor_rollout_ref.model.lora.rank": Only((0,), "all weights are trained"),
    "actor_rollout_ref.model.mtp.enable": Only((False,), "there is no multi-token prediction"),
    "actor_rollout_ref.model.use_fused_kernels": LeftOut(KERNELS),
    "actor_rollout_ref.model.use_liger": LeftOut(KERNELS),
    "actor_rollout_ref.model.use_shm": LeftOut(LOADER),
    "actor_rollout_ref.model.tokenizer_path": Only((None,), "the tokenizer is the model's own"),
    "actor_rollout_ref.model.hf_config_path": Only((None,), "the config.json is the model's own"),
    "actor_rollout_ref.model.custom_chat_template": Only((None,), TEMPLATE),
    "actor_rollout_ref.model.external_lib": Only((None,), "code that comes with a model is not run"),
    "actor_rollout_ref.model.enable_activation_offload": LeftOut(MEMORY),
    "actor_rollout_ref.actor.strategy": Only(("fsdp", "fsdp2"), "the trainer has FSDP2 only"),
    "actor_rollout_ref.actor.fsdp_config.strategy": Only(("fsdp", "fsdp2"), "the trainer has FSDP2 only"),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": Only(
        ("fp32", "float32"), "parameters and optimizer are float32; computed is in dtype"
    ),
    "actor_rollout_ref.actor.fsdp_config.dtype": Becomes(
        "trainer.precision",
        one_of({"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}),
    ),
    "actor_rollout_ref.actor.use_remove_padding": LeftOut("groups are always packed"),
    "actor_rollout_ref.actor.use_fused_kernels": LeftOut(KERNELS),
    "actor_rollout_ref.actor.use_prefix_grouper": LeftOut("a group's prompt is always computed once"),
    "actor_rollout_ref.actor.shuffle": Only((False,), "groups are trained in the order in which they come"),
    "actor_rollout_ref.actor.data_loader_seed": LeftOut("groups are trained in the order in which they come"),
    "actor_rollout_ref.actor.calculate_entropy": LeftOut("a metric of verl's"),
    "actor_rollout_ref.actor.entropy_checkpointing": LeftOut(MEMORY),
    "actor_rollout_ref.actor.loss_scale_factor": LeftOut("loss_agg_mode=seq-mean-token-sum-norm alone reads it"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Becomes("trainer.ppo_mini_batch_size", positive),
    "actor_rollout_ref.actor.ppo_micro_batch_size": LeftOut(MEMORY),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": LeftOut(MEMORY),
    "actor_rollout_ref.actor.use_dynamic_bsz": LeftOut("micro-batches are always filled by tokens"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Becomes("trainer.micro_batch_tokens"),
    "actor_rollout_ref.actor.ppo_epochs": Only((1,), "a group is trained once"),
    "actor_rollout_ref.actor.clip_ratio": LeftOut("verl reads clip_ratio_low and clip_ratio_high"),
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
    "actor_rollout_ref.actor.policy_loss.loss_mode": Only(("vanilla",), CLIPPED),
    "actor_rollout_ref.actor.use_rollout_log_probs": Only((True,), RECOMPUTED),
    "actor_rollout_ref.actor.grad_clip": Becomes("trainer.max_grad_norm"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": LeftOut(MEMORY),
    "actor_rollout_ref.actor.use_torch_compile": LeftOut(MEMORY),
    "actor_rollout_ref.actor.optim.clip_grad": Becomes("trainer.max_grad_norm"),
    "actor_rollout_ref.actor.optim.optimizer": Only(("AdamW",), "the optimizer is AdamW"),
    "actor_rollout_ref.actor.optim.optimizer_impl": Only(("torch.optim",), "the optimizer is torch's AdamW"),
    "actor_rollout_ref.actor.optim.betas": Only(([0.9, 0.999],), "they are AdamW's own"),
    "actor_rollout_ref.actor.optim.min_lr_ratio": LeftOut("the rate is constant after warm-up"),
    "actor_rollout_ref.actor.optim.num_cycles": LeftOut("the rate is constant after warm-up"),
    "actor_rollout_ref.actor.optim.lr": Becomes("trainer.learning_rate"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Becomes("trainer.warmup_steps", frequency),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": Only((0,), "set lr_warmup_steps"),
    "actor_rollout_ref.actor.optim.weight_decay": Becomes("trainer.weight_decay"),
    "actor_rollout_ref.actor.optim.warmup_style": Only(("constant", None), "the rate is constant after warm-up"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Only(("constant",), "the rate is constant after warm-up"),
    "actor_rollout_ref.actor.optim.total_training_steps": LeftOut("the rate is constant after warm-up"),
    "actor_rollout_ref.rollout.name": Only(("vllm",), "engines are vLLM"),
    "actor_rollout_ref.rollout.mode": Only(("async",), "engines take requests one by one"),
    "actor_rollout_ref.rollout.nnodes": LeftOut("verl's asynchronous trainer reads rollout.nnodes"),
    "actor_rollout_ref.rollout.n_gpus_per_node": LeftOut("verl's asynchronous trainer reads rollout.n_gpus_per_node"),
    "actor_rollout_ref.rollout.prompt_length": Becomes("data.max_prompt_tokens"),
    "actor_rollout_ref.rollout.response_length": Becomes("rollout.max_new_tokens"),
    "actor_rollout_ref.rollout.n": Becomes("rollout.group_size", group),
    "actor_rollout_ref.rollout.temperature": Becomes("rollout.temperature"),
    "actor_rollout_ref.rollout.top_p": Only((1,), "truncated sampling biases the ratio; set 1.0"),
    "actor_rollout_ref.rollout.top_k": Only((-1, 0), "truncated sampling biases the ratio; set -1"),
    "actor_rollout_ref.rollout.ignore_eos": Only((False,), "the end-of-sequence token ends a response"),
    "actor_rollout_ref.rollout.do_sample": Only((True,), "training rollouts are sampled"),
    "actor_rollout_ref.rollout.calculate_log_probs": Only((True,), "every token carries its log-prob"),
    "actor_rollout_ref.rollout.dtype": Becomes(
        "rollout.dtype", one_of({"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"})
    ),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Part("rollout.tensor_parallel_size"),
    "actor_rollout_ref.rollout.data_parallel_size": Only(
        (1,), "an engine is tensor-parallel only: there are more engines"
    ),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": Only((1,), "an engine is tensor-parallel only"),
    "actor_rollout_ref.rollout.expert_parallel_size": LeftOut(
        "how an engine's GPUs share out experts, which changes no result"
    ),
    "actor_rollout_ref.rollout.seed": LeftOut("all that is random follows data.seed"),
    "actor_rollout_ref.rollout.logprobs_mode": Only(
        ("processed_logprobs",), "log-probs are those of the distribution that was sampled from"
    ),
    "actor_rollout_ref.rollout.quantization": Only((None,), "engines have the trainer's weights as they are"),
    "actor_rollout_ref.rollout.disaggregation.enabled": Only((False,), "an engine prefills and decodes"),
    "actor_rollout_ref.rollout.over_sample_rate": Only((0,), "what is generated is trained"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Becomes("rollout.gpu_memory_utilization"),
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization": Part("rollout.gpu_memory_utilization", NUMBER),
    "actor_rollout_ref.rollout.multi_turn.enable": Only((False,), "responses have one turn"),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": LeftOut(SYNC),
    "algorithm.adv_estimator": Only(("grpo",), "advantages are group-relative"),
    "algorithm.norm_adv_by_std_in_grpo": Becomes("algorithm.normalize_std"),
    "algorithm.use_kl_in_reward": Only((False,), "KL stands in the loss: set use_kl_loss"),
    "algorithm.kl_ctrl.kl_coef": LeftOut("KL does not stand in the reward"),
    "algorithm.kl_penalty": LeftOut("KL does not stand in the reward"),
    "algorithm.use_pf_ppo": Only((False,), "every group is trained once"),
    "algorithm.gamma": LeftOut("GRPO has no discount"),
    "algorithm.lam": LeftOut("GRPO has no critic"),
    "algorithm.filter_groups.enable": Only((False,), "groups without variance stay in their batch and cost nothing"),
    "algorithm.rollout_correction.bypass_mode": Part("algorithm.old_log_prob", FLAG),
    "algorithm.rollout_correction.loss_type": Only(("ppo_clip",), CLIPPED),
    "algorithm.rollout_correction.rollout_is": Part("algorithm.old_log_prob", words=("token",)),
    "algorithm.rollout_correction.rollout_is_threshold": Part("algorithm.behaviour_cap", NUMBER),
    "algorithm.rollout_correction.rollout_is_batch_normalize": Only((False,), "weights are truncated, not normalised"),
    "algorithm.rollout_correction.rollout_rs": Only((None,), "no token is rejected"),
    "algorithm.rollout_correction.rollout_rs_threshold": LeftOut("without rollout_rs it says nothing"),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": LeftOut("without rollout_rs it says nothing"),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Only((None,), "no token is rejected"),
    "reward_model.enable": Only((False, None), "rewards are functions"),
    "reward.reward_model.enable": Only((False,), "rewards are functions"),
    "reward_model.reward_manager": LeftOut("functions are named in `rewards`"),
    "reward.reward_manager.name": LeftOut("functions are named in `rewards`"),
    "reward.reward_manager.source": Only(("register",), OWN_REWARD),
    "reward_model.launch_reward_fn_async": LeftOut("rewards are always computed while others generate"),
    "reward_model.num_workers": LeftOut("reward functions have as many processes as they need"),
    "reward.num_workers": LeftOut("reward functions have as many processes as they need"),
    "sandbox_fusion.url": Only((None,), "reward functions call no sandbox: write one that does"),
    "trainer.experiment_name": Becomes("name", slug),
    "trainer.project_name": Becomes("tracking.experiment", str),
    "trainer.nnodes": Part("trainer.ranks"),
    "trainer.n_gpus_per_node": Part("trainer.ranks"),
    "trainer.total_epochs": Becomes("data.epochs"),
    "trainer.total_training_steps": LeftOut(
        "as in verl's asynchronous trainer, steps follow from rollout.total_rollout_steps"
    ),
    "trainer.test_freq": Becomes("evaluation.every", frequency),
    "trainer.save_freq": Becomes("checkpoint.every", frequency),
    "trainer.max_actor_ckpt_to_keep": Becomes("checkpoint.keep"),
    "trainer.resume_mode": Becomes("checkpoint.resume", one_of({"auto": "auto", "disable": "never"})),
    "trainer.resume_from_path": Only((None,), "a run resumes from its own checkpoints"),
    "trainer.checkpoint_callback_class": Only((None,), "nothing is called at a checkpoint"),
    "trainer.use_v1": Only((False,), "settings of the V1 trainer are not converted; docs/from_verl.md names its knobs"),
    "trainer.del_local_ckpt_after_load": LeftOut(OUTPUT),
    "trainer.max_critic_ckpt_to_keep": LeftOut("GRPO has no critic"),
    "trainer.esi_redundant_time": LeftOut("tidemill stop commits a checkpoint whenever it is asked to"),
    "trainer.ray_wait_register_center_timeout": LeftOut("waits have deadlines of their own"),
    "trainer.rollout_data_dir": LeftOut(RENDERED),
    "trainer.validation_data_dir": LeftOut(RENDERED),
    "trainer.default_hdfs_dir": LeftOut(OUTPUT),
    "trainer.val_before_train": LeftOut("held-out prompts are always scored before training"),
    "trainer.val_only": Only((False,), "use tidemill evaluate"),
    "trainer.critic_warmup": Only((0,), "there is no critic"),
    "trainer.balance_batch": LeftOut("rows are always shared out evenly"),
    "trainer.logger": LeftOut("MLflow always has everything"),
    "trainer.log_val_generations": LeftOut("all answers stand in MLflow"),
    "trainer.default_local_dir": LeftOut(OUTPUT),
    "trainer.device": LeftOut("the device is found"),
    "distillation.enabled": Only((False,), "there is no teacher"),
}
RULES: Mapping[str, Rule] = {
    **SETTINGS,
    **{f"{section}{key}": rule for section, rules in REWARDS.items() for key, rule in rules.items()},
}
PREFIXES: Mapping[str, LeftOut | Never] = {
    "algorithm.filter_groups.": LeftOut(WITHOUT),
    "algorithm.kl_ctrl.": LeftOut("KL does not stand in the reward"),
    "algorithm.pf_ppo.": LeftOut(WITHOUT),
    "filter.": Never("groups without variance stay in their batch and cost nothing"),
    "data.apply_chat_template_kwargs": Never(TEMPLATE),
    "data.image_": Never(ROWS),
    "data.video_": Never(ROWS),
    "actor_rollout_ref.model.override_config": Never(
        "the model's own config.json is read: set it there, take this out"
    ),
    "actor_rollout_ref.model.fused_kernel_options.": LeftOut(KERNELS),
    "actor_rollout_ref.model.tiled_mlp.": LeftOut(MEMORY),
    "actor_rollout_ref.model.mtp.": LeftOut(WITHOUT),
    "actor_rollout_ref.model.lora.": LeftOut(WITHOUT),
    "actor_rollout_ref.actor.megatron.": Never("the trainer is data-parallel (FSDP2)"),
    "actor_rollout_ref.actor.entropy_from_logits_": LeftOut(MEMORY),
    "actor_rollout_ref.actor.policy_loss.": LeftOut(CLIPPED),
    "actor_rollout_ref.actor.optim.override_optimizer_config": Never("the optimizer is torch's AdamW"),
    "actor_rollout_ref.actor.optim.lr_decay_": LeftOut("the rate is constant after warm-up"),
    "actor_rollout_ref.actor.profiler.": LeftOut("tidemill timeline shows where the time goes"),
    "actor_rollout_ref.rollout.disaggregation.": LeftOut(WITHOUT),
    "actor_rollout_ref.rollout.trace.": LeftOut(RENDERED),
    "actor_rollout_ref.rollout.prometheus.": LeftOut(RENDERED),
    "reward.reward_manager.module.": LeftOut(WITHOUT),
    "reward.reward_model.": LeftOut(WITHOUT),
    "reward.sandbox_fusion.": LeftOut(WITHOUT),
    "sandbox_fusion.": LeftOut(WITHOUT),
    "reward_model.sandbox_fusion.": LeftOut(WITHOUT),
    "distillation.": LeftOut(WITHOUT),
    "trainer.v1.": Never("settings of the V1 trainer are not converted; docs/from_verl.md names its knobs"),
    "global_profiler.": LeftOut("tidemill timeline shows where the time goes"),
    "hydra.": LeftOut(OUTPUT),
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
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.layered_summon": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.multi_stage_wake_up": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.scheduling_policy": LeftOut(ENGINE),
    "actor_rollout_ref.rollout.skip_tokenizer_init": LeftOut(ENGINE),
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
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "algorithm.adv_estimator": "gae",
    "trainer.experiment_name": "gsm8k",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.total_epochs": 30,
}


def rule_of(key: str) -> Rule | None:
    """The rule for a key of verl; None for one that is not known here."""
    if key in RULES:
        return RULES[key]
    return next((rule for prefix, rule in PREFIXES.items() if key.startswith(prefix)), None)
