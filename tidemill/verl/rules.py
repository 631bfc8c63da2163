"""The rule for every setting of verl's fully asynchronous trainer: its counterpart here, or why it has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Becomes:
    """The setting has a counterpart; `convert` makes our value, and raises ValueError with what is allowed."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Part:
    """The setting makes one of ours together with others, in `convert.combined`."""

    key: str  # of Tidemill
    kinds: tuple[type[int] | type[float], ...] = (int,)  # types that the value may have; empty for any
    words: tuple[str, ...] = ()  # texts that the value may be, instead of a number


@dataclass(frozen=True, slots=True)
class Only:
    """Tidemill can only do what `values` mean, all of which mean the same; without any, the setting is refused."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The setting changes nothing of what is learned, or Tidemill always does it."""

    why: str


Rule = Becomes | Part | Only | LeftOut
NUMBER, FLAG = (int, float), (bool,)


def at_least(least: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return convert


def single_file(value: Any) -> str:
    names = value if isinstance(value, list) else [value]
    if len(names) != 1:
        raise ValueError("one file: put the rows of all files into one")
    return str(names[0])


def either(values: Iterable[Any]) -> str:
    """Values in words; None is `null`, as in verl's command."""
    return " or ".join("null" if value is None else str(value) for value in values)


def one_of(table: Mapping[Any, Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, Hashable) or value not in table:
            raise ValueError(either(table))
        return table[value]

    return convert


def frequency(value: Any) -> int:
    """A number of steps. verl writes -1 for never; Tidemill writes 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return max(0, value)


def limit(value: Any) -> int | None:
    """A largest number; -1 means no limit in verl, null here."""
    return frequency(value) or None


def slug(value: Any) -> str:
    return re.sub("[^a-z0-9]+", "-", str(value).lower()).strip("-")[:63].strip("-") or "run"


ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
REWARD_PLACES = ("reward_model.", "reward.")
"""The groups that hold a reward's settings, in earlier and in later versions of verl."""
OVERLONG = "reward_kwargs.overlong_buffer_cfg."
KWARGS = ("custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs")

NO_CODE = "code that comes with a model is not run"
FSDP = "the trainer is data-parallel (FSDP2)"
WEIGHTS = "all weights are trained"
UNQUANTIZED = "engines have the trainer's weights as they are"
CLIPPED = "the loss is the clipped surrogate"
CONSTANT = "the learning rate is constant after warm-up"
TEMPLATE = "prompts are rendered by the chat template that comes with the model: change it there"
TEXT_ROWS = "prompts are the rows of a file, text only"
OWN_CONFIG = "the model's own config.json is used: change it there, and take this out"
RECOMPUTED = "take it out; algorithm.rollout_correction.bypass_mode=False has the trainer compute old log-probs"
TOKENIZER = "the tokenizer is the model's own"
V1 = "settings of the V1 trainer are not converted; docs/from_verl.md names its knobs"
OWN_REWARD = "take it out, and name the function with --set rewards.0.function=package.module:function"
SANDBOX = "reward functions call no sandbox: write one that does"
TOGETHER = "an engine is tensor-parallel only"

ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "gdpo": "gdpo",
}

CONVERTED: Mapping[str, Becomes | Part] = {
    "async_training.staleness_threshold": Part("asynchrony.staleness_threshold, asynchrony.max_staleness", NUMBER),
    "async_training.trigger_parameter_sync_step": Becomes("asynchrony.trigger_parameter_sync_step", at_least(1)),
    "async_training.require_batches": Becomes("asynchrony.require_batches", at_least(1)),
    "async_training.partial_rollout": Part("asynchrony.partial_rollout", FLAG),
    "async_training.concurrent_samples_per_replica": Becomes("rollout.concurrent_samples_per_replica"),
    "async_training.compute_prox_log_prob": Part("algorithm.old_log_prob", FLAG),
    "rollout.nnodes": Part("rollout.engines"),
    "rollout.n_gpus_per_node": Part("rollout.engines"),
    "rollout.total_rollout_steps": Becomes("rollout.total_rollout_steps"),
    "rollout.total_epochs": Becomes("data.epochs"),
    "rollout.test_freq": Becomes("evaluation.every", frequency),
    "data.train_files": Becomes("data.train", single_file),
    "data.val_files": Becomes("data.held_out", single_file),
    "data.prompt_key": Becomes("data.prompt_key"),
    "data.max_prompt_length": Becomes("data.max_prompt_tokens"),
    "data.max_response_length": Becomes("rollout.max_new_tokens"),
    "data.shuffle": Becomes("data.shuffle"),
    "data.seed": Becomes("seed"),
    "data.val_max_samples": Becomes("evaluation.max_prompts", limit),
    f"{MODEL}path": Becomes("model"),
    f"{MODEL}enable_gradient_checkpointing": Becomes("trainer.gradient_checkpointing"),
    f"{ACTOR}fsdp_config.dtype": Becomes(
        "trainer.precision",
        one_of({"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}),
    ),
    f"{ACTOR}ppo_mini_batch_size": Becomes("trainer.ppo_mini_batch_size", at_least(1)),
    f"{ACTOR}ppo_max_token_len_per_gpu": Becomes("trainer.micro_batch_tokens"),
    f"{ACTOR}clip_ratio_low": Becomes("algorithm.clip_ratio_low"),
    f"{ACTOR}clip_ratio_high": Becomes("algorithm.clip_ratio_high"),
    f"{ACTOR}clip_ratio_c": Becomes("algorithm.dual_clip"),
    f"{ACTOR}loss_agg_mode": Becomes(
        "algorithm.aggregation",
        one_of({"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum": "sequence_sum"}),
    ),
    f"{ACTOR}use_kl_loss": Part("algorithm.kl_loss_coef", FLAG),
    f"{ACTOR}kl_loss_coef": Part("algorithm.kl_loss_coef", NUMBER),
    f"{ACTOR}grad_clip": Becomes("trainer.max_grad_norm"),
    f"{ACTOR}optim.clip_grad": Becomes("trainer.max_grad_norm"),
    f"{ACTOR}optim.lr": Becomes("trainer.learning_rate"),
    f"{ACTOR}optim.lr_warmup_steps": Becomes("trainer.warmup_steps", frequency),
    f"{ACTOR}optim.weight_decay": Becomes("trainer.weight_decay"),
    f"{ROLLOUT}prompt_length": Becomes("data.max_prompt_tokens"),
    f"{ROLLOUT}response_length": Becomes("rollout.max_new_tokens"),
    f"{ROLLOUT}n": Becomes("rollout.group_size", at_least(1)),
    f"{ROLLOUT}temperature": Becomes("rollout.temperature"),
    f"{ROLLOUT}dtype": Becomes("rollout.dtype", one_of({name: name for name in ("bfloat16", "float32", "auto")})),
    f"{ROLLOUT}tensor_model_parallel_size": Part("rollout.tensor_parallel_size"),
    f"{ROLLOUT}gpu_memory_utilization": Becomes("rollout.gpu_memory_utilization"),
    f"{ROLLOUT}standalone_gpu_memory_utilization": Part("rollout.gpu_memory_utilization", NUMBER),
    "algorithm.adv_estimator": Becomes("algorithm.adv_estimator", one_of(ESTIMATORS)),
    "algorithm.gamma": Becomes("algorithm.gamma"),
    "algorithm.norm_adv_by_std_in_grpo": Becomes("algorithm.normalize_std"),
    f"{CORRECTION}bypass_mode": Part("algorithm.old_log_prob", FLAG),
    f"{CORRECTION}rollout_is": Part(f"algorithm.old_log_prob, {CORRECTION}rollout_is", words=("token", "sequence")),
    f"{CORRECTION}rollout_is_threshold": Part(f"{CORRECTION}rollout_is_threshold", NUMBER),
    **{f"{place}{OVERLONG}enable": Part("rewards.N.options", FLAG) for place in REWARD_PLACES},
    **{f"{place}{OVERLONG}len": Part("rewards.N.options") for place in REWARD_PLACES},
    **{f"{place}{OVERLONG}penalty_factor": Part("rewards.N.options", NUMBER) for place in REWARD_PLACES},
    **{f"{place}reward_kwargs.max_resp_len": Part("rewards.N.options") for place in REWARD_PLACES},
    "trainer.experiment_name": Becomes("name", slug),
    "trainer.project_name": Becomes("tracking.experiment", str),
    "trainer.nnodes": Part("trainer.ranks"),
    "trainer.n_gpus_per_node": Part("trainer.ranks"),
    "trainer.total_epochs": Becomes("data.epochs"),
    "trainer.test_freq": Becomes("evaluation.every", frequency),
    "trainer.save_freq": Becomes("checkpoint.every", frequency),
    "trainer.max_actor_ckpt_to_keep": Becomes("checkpoint.keep"),
    "trainer.resume_mode": Becomes("checkpoint.resume", one_of({"auto": "auto", "disable": "never"})),
}
FIXED: Mapping[str, Only] = {
    "async_training.use_rollout_log_probs": Only((True,), RECOMPUTED),
    "async_training.use_dynamic_resource_scheduling": Only((False,), "GPUs are not lent between trainer and engines"),
    "model_engine": Only(("dp",), FSDP),
    "data.train_batch_size": Only(
        (0,),
        "groups stream; between two syncs ppo_mini_batch_size * require_batches * trigger_parameter_sync_step train",
    ),
    "data.gen_batch_size": Only((1, None), "groups stream one by one"),
    "data.train_max_samples": Only((-1,), "all rows are read: shorten the file"),
    "data.tokenizer": Only((None,), TOKENIZER),
    "data.custom_cls.path": Only((None,), f"{TEXT_ROWS}: write one"),
    "data.trust_remote_code": Only((False,), NO_CODE),
    "actor_rollout_ref.hybrid_engine": Only((False,), "trainer and engines have GPUs of their own"),
    f"{MODEL}trust_remote_code": Only((False,), NO_CODE),
    f"{MODEL}external_lib": Only((None,), NO_CODE),
    f"{MODEL}lora_rank": Only((0,), WEIGHTS),
    f"{MODEL}lora_adapter_path": Only((None,), WEIGHTS),
    f"{MODEL}lora.rank": Only((0,), WEIGHTS),
    f"{MODEL}mtp.enable": Only((False,), "there is no multi-token prediction"),
    f"{MODEL}tokenizer_path": Only((None,), TOKENIZER),
    f"{MODEL}hf_config_path": Only((None,), "the config.json is the model's own"),
    f"{MODEL}custom_chat_template": Only((None,), TEMPLATE),
    f"{ACTOR}strategy": Only(("fsdp", "fsdp2"), "the trainer has FSDP2 only"),
    f"{ACTOR}fsdp_config.strategy": Only(("fsdp", "fsdp2"), "the trainer has FSDP2 only"),
    f"{ACTOR}fsdp_config.model_dtype": Only(
        ("fp32", "float32"), "parameters and optimizer are float32; dtype sets the precision of the computation"
    ),
    f"{ACTOR}fsdp_config.qat.enable": Only((False,), UNQUANTIZED),
    f"{ACTOR}shuffle": Only((False,), "groups are trained in the order in which they arrive"),
    f"{ACTOR}ppo_epochs": Only((1,), "a group is trained once"),
    f"{ACTOR}entropy_coeff": Only((0,), "there is no entropy bonus"),
    f"{ACTOR}kl_loss_type": Only(("low_var_kl", "k3"), "KL is estimated by k3"),
    f"{ACTOR}policy_loss.loss_mode": Only(("vanilla",), CLIPPED),
    f"{ACTOR}use_rollout_log_probs": Only((True,), RECOMPUTED),
    f"{ACTOR}optim.optimizer": Only(("AdamW",), "the optimizer is AdamW"),
    f"{ACTOR}optim.optimizer_impl": Only(("torch.optim",), "the optimizer is torch's AdamW"),
    f"{ACTOR}optim.betas": Only(([0.9, 0.999],), "they are the defaults of AdamW"),
    f"{ACTOR}optim.lr_warmup_steps_ratio": Only((0,), "set lr_warmup_steps"),
    f"{ACTOR}optim.warmup_style": Only(("constant", None), CONSTANT),
    f"{ACTOR}optim.lr_scheduler_type": Only(("constant",), CONSTANT),
    f"{ROLLOUT}name": Only(("vllm",), "engines are vLLM"),
    f"{ROLLOUT}mode": Only(("async",), "engines take requests one by one"),
    f"{ROLLOUT}top_p": Only((1,), "truncated sampling biases the ratio; set 1.0"),
    f"{ROLLOUT}top_k": Only((-1, 0), "truncated sampling biases the ratio; set -1"),
    f"{ROLLOUT}repetition_penalty": Only((1,), "a penalty changes the distribution that is sampled from; set 1.0"),
    f"{ROLLOUT}ignore_eos": Only((False,), "the end-of-sequence token ends a response"),
    f"{ROLLOUT}do_sample": Only((True,), "training rollouts are sampled"),
    f"{ROLLOUT}calculate_log_probs": Only((True,), "every token carries its log-prob"),
    f"{ROLLOUT}data_parallel_size": Only((1,), f"{TOGETHER}: take more engines"),
    f"{ROLLOUT}pipeline_model_parallel_size": Only((1,), TOGETHER),
    f"{ROLLOUT}logprobs_mode": Only(
        ("processed_logprobs",), "log-probs are those of the distribution that was sampled from"
    ),
    f"{ROLLOUT}quantization": Only((None,), UNQUANTIZED),
    f"{ROLLOUT}engine_kwargs.vllm.quantization": Only((None,), UNQUANTIZED),
    f"{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype": Only(
        (None, "auto"), "an engine stores keys and values as it computes them"
    ),
    f"{ROLLOUT}enable_rollout_routing_replay": Only((False,), "the trainer chooses experts by its own router"),
    f"{ROLLOUT}disaggregation.enabled": Only((False,), "every engine prefills and decodes"),
    f"{ROLLOUT}over_sample_rate": Only((0,), "everything that is generated is trained"),
    f"{ROLLOUT}multi_turn.enable": Only((False,), "responses have one turn"),
    "algorithm.use_kl_in_reward": Only((False,), "the KL term is part of the loss: set use_kl_loss"),
    "algorithm.use_pf_ppo": Only((False,), "every group is trained once"),
    "algorithm.filter_groups.enable": Only((False,), "groups without variance stay in their batch and cost nothing"),
    f"{CORRECTION}loss_type": Only(("ppo_clip",), CLIPPED),
    f"{CORRECTION}rollout_is_batch_normalize": Only((False,), "weights are truncated, not normalised"),
    f"{CORRECTION}rollout_rs": Only((None,), "no token is rejected"),
    f"{CORRECTION}rollout_token_veto_threshold": Only((None,), "no token is rejected"),
    **{f"{place}custom_reward_function.path": Only((None,), OWN_REWARD) for place in ("", "reward.")},
    **{name: Only((None, {}), "write its settings one by one") for name in KWARGS},
    "reward_model.enable": Only((False, None), "rewards are functions"),
    "reward.reward_model.enable": Only((False,), "rewards are functions"),
    "reward.reward_manager.source": Only(("register",), OWN_REWARD),
    **{f"{place}sandbox_fusion.url": Only((None,), SANDBOX) for place in ("", *REWARD_PLACES)},
    "trainer.resume_from_path": Only((None,), "a run resumes from its own checkpoints"),
    "trainer.checkpoint_callback_class": Only((None,), "a checkpoint calls no function of yours"),
    "trainer.use_v1": Only((False,), V1),
    "trainer.val_only": Only((False,), "use tidemill evaluate"),
    "trainer.critic_warmup": Only((0,), "there is no critic"),
    "distillation.enabled": Only((False,), "there is no teacher"),
}
LEFT_OUT: Mapping[str, str] = {
    "how memory is used; ranks always share the parameters (FSDP2) and pack by tokens": f"""
        {MODEL}enable_activation_offload {MODEL}tiled_mlp.* {ACTOR}fsdp_config.* {ACTOR}entropy_checkpointing
        {ACTOR}entropy_from_logits_* {ACTOR}ppo_micro_batch_size {ACTOR}ppo_micro_batch_size_per_gpu
        {ACTOR}ulysses_sequence_parallel_size {ACTOR}use_torch_compile""",
    "an internal setting of vLLM, which changes no result": f"""
        {ROLLOUT}engine_kwargs.* {ROLLOUT}enable_* {ROLLOUT}enforce_eager* {ROLLOUT}free_cache_engine*
        {ROLLOUT}load_format* {ROLLOUT}max_num_* {ROLLOUT}max_model_len* {ROLLOUT}disable_log_stats*
        {ROLLOUT}cudagraph_capture_sizes* {ROLLOUT}layered_summon* {ROLLOUT}multi_stage_wake_up*
        {ROLLOUT}scheduling_policy* {ROLLOUT}skip_tokenizer_init* {ROLLOUT}expert_parallel_size""",
    "runs, logs and checkpoints have places of their own: output, tracking, store": """
        hydra.* trainer.del_local_ckpt_after_load trainer.default_hdfs_dir trainer.default_local_dir""",
    "verl's data loader, which does not exist here": f"""
        data.filter_overlong_prompts_workers data.return_raw_chat data.dataloader_num_workers data.validation_shuffle
        data.return_raw_input_ids data.return_full_prompt data.use_shm data.return_multi_modal_inputs
        {MODEL}use_shm""",
    "how weights reach the engines: sync.transport": f"""
        async_training.checkpoint_engine.* {ROLLOUT}checkpoint_engine.* {ROLLOUT}update_weights_bucket_megabytes""",
    "kernels of verl's trainer, which change no result": f"""
        {MODEL}use_fused_kernels {MODEL}use_liger {MODEL}fused_kernel_options.* {ACTOR}use_fused_kernels""",
    "MLflow has all metrics and answers": f"""
        trainer.rollout_data_dir trainer.validation_data_dir trainer.logger trainer.log_val_generations
        {ROLLOUT}trace.* {ROLLOUT}prometheus.* {ACTOR}calculate_entropy""",
    "what it belongs to is off": f"""
        algorithm.filter_groups.* algorithm.pf_ppo.* {MODEL}mtp.* {MODEL}lora.* {MODEL}lora_alpha
        {MODEL}target_modules {MODEL}exclude_modules {ROLLOUT}disaggregation.* reward.reward_manager.module.*
        reward.reward_model.* reward.sandbox_fusion.* reward_model.sandbox_fusion.* sandbox_fusion.* distillation.*
        data.custom_cls.name async_training.dynamic_schedule_policy async_training.dynamic_schedule_deactivate_ratio
        async_training.dynamic_schedule_enable_rebalance {CORRECTION}rollout_rs_threshold
        {CORRECTION}rollout_rs_threshold_lower""",
    "rewards are functions, named in `rewards`": """
        custom_reward_function.name reward.custom_reward_function.name reward_model.reward_manager
        reward.reward_manager.name data.reward_fn_key""",
    "every reward function has a metric of its own": " ".join(f"{place}{OVERLONG}log" for place in REWARD_PLACES),
    "half of the cores compute rewards, in 2 to 32 processes": "reward_model.num_workers reward.num_workers",
    "rewards are always computed during generation": "reward_model.launch_reward_fn_async",
    "advantages are computed by the trainer": "async_training.compute_advantage_in_rollout",
    "the engines of the run answer held-out prompts": "async_training.use_trainer_do_validate data.val_batch_size",
    "held-out prompts are answered greedily, once each": f"{ROLLOUT}val_kwargs.*",
    "held-out prompts are always scored before training": "trainer.val_before_train",
    "a prompt longer than data.max_prompt_tokens is skipped and counted, never cut": """
        data.truncation data.filter_overlong_prompts""",
    "verl's asynchronous trainer reads rollout.nnodes and rollout.n_gpus_per_node": f"""
        {ROLLOUT}nnodes {ROLLOUT}n_gpus_per_node""",
    "verl reads actor_rollout_ref.rollout.n": "rollout.n",
    "verl reads clip_ratio_low and clip_ratio_high": f"{ACTOR}clip_ratio",
    "only loss_agg_mode=seq-mean-token-sum-norm reads it": f"{ACTOR}loss_scale_factor",
    "groups are always packed": f"{MODEL}use_remove_padding {ACTOR}use_remove_padding",
    "micro-batches are always filled by tokens": f"{ACTOR}use_dynamic_bsz",
    "a group's prompt is always computed once": f"{ACTOR}use_prefix_grouper",
    "groups are trained in the order in which they arrive": f"{ACTOR}data_loader_seed",
    "rows are always shared evenly among the ranks": "trainer.balance_batch",
    "every wait has a deadline of its own, such as sync.timeout_s": """
        actor_rollout_ref.nccl_timeout trainer.ray_wait_register_center_timeout""",
    CONSTANT: f"""
        {ACTOR}optim.min_lr_ratio {ACTOR}optim.num_cycles {ACTOR}optim.total_training_steps {ACTOR}optim.lr_decay_*
        {ACTOR}optim.zero_indexed_step""",
    CLIPPED: f"{ACTOR}policy_loss.*",
    "everything random follows data.seed": f"{ROLLOUT}seed",
    "the KL term is part of the loss, not of the reward": "algorithm.kl_ctrl.* algorithm.kl_penalty",
    "GRPO has no critic": "algorithm.lam critic.* trainer.max_critic_ckpt_to_keep",
    "steps follow from rollout.total_rollout_steps, as in verl's asynchronous trainer": "trainer.total_training_steps",
    "tidemill stop commits a checkpoint at any time": "trainer.esi_redundant_time",
    "a checkpoint always holds everything that a restart needs": f"{ACTOR}checkpoint.*",
    "the device is detected": "trainer.device",
    "tidemill timeline shows where the time goes": f"{ACTOR}profiler.* {ROLLOUT}profiler.* global_profiler.*",
    "cluster.provider says where Ray comes from": "ray_kwargs.* ray_init.*",
    "the reference is computed with the policy's settings": "actor_rollout_ref.ref.*",
    "the trainer computes log-probs with its own settings": f"{ROLLOUT}log_prob_*",
    "one rollouter serves all engines": f"{ROLLOUT}agent.*",
    "responses have one turn": f"{ROLLOUT}multi_turn.*",
    "only the V1 trainer reads it": "transfer_queue.*",
}
"""The settings that are left out, by the reason; a star stands for any rest of the name."""
REFUSED: Mapping[str, str] = {
    "groups without variance stay in their batch and cost nothing": "filter.*",
    TEMPLATE: "data.apply_chat_template_kwargs*",
    TEXT_ROWS: "data.image_* data.video_*",
    OWN_CONFIG: f"""
        {MODEL}override_config* {ROLLOUT}engine_kwargs.vllm.hf_overrides* {ROLLOUT}engine_kwargs.vllm.rope_scaling*""",
    "a processor changes the distribution that is sampled from, and the ratio does not know of it": f"""
        {ROLLOUT}engine_kwargs.vllm.logits_processors*""",
    "set actor_rollout_ref.actor.fsdp_config.dtype": f"{ACTOR}fsdp_config.mixed_precision*",
    FSDP: f"{ACTOR}megatron.*",
    "the optimizer is torch's AdamW": f"{ACTOR}optim.override_optimizer_config*",
    V1: "trainer.v1.*",
}
"""The settings without a counterpart, by the reason."""
RULES: Mapping[str, Rule] = {
    **CONVERTED,
    **{f"{name}.*": Part("rewards.N.options", kinds=()) for name in KWARGS},
    **FIXED,
    **{key: LeftOut(why) for why, keys in LEFT_OUT.items() for key in keys.split()},
    **{key: Only((), why) for why, keys in REFUSED.items() for key in keys.split()},
}
UNLIKE = (
    "async_training.staleness_threshold async_training.trigger_parameter_sync_step async_training.partial_rollout "
    "rollout.nnodes rollout.n_gpus_per_node rollout.total_rollout_steps data.max_prompt_length "
    f"data.max_response_length {MODEL}enable_gradient_checkpointing {ACTOR}clip_ratio_low {ACTOR}clip_ratio_high "
    f"{ACTOR}ppo_mini_batch_size {ACTOR}ppo_max_token_len_per_gpu {ACTOR}use_kl_loss {ACTOR}kl_loss_coef "
    f"{ACTOR}optim.weight_decay {ROLLOUT}n {ROLLOUT}tensor_model_parallel_size {ROLLOUT}gpu_memory_utilization "
    "algorithm.adv_estimator trainer.experiment_name trainer.nnodes trainer.n_gpus_per_node trainer.save_freq "
    "trainer.total_epochs"
).split()
"""Settings whose default in verl differs from ours or must be checked: a command without them has verl's default."""


def rule_of(key: str) -> Rule | None:
    """The rule for a key of verl: its own, or that of the longest name with a star; None for an unknown key."""
    if key in RULES:
        return RULES[key]
    matching = [name for name in RULES if name.endswith("*") and key.startswith(name[:-1])]
    return RULES[max(matching, key=len)] if matching else None
