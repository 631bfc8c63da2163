#!/usr/bin/env bash
# A verl run in fully asynchronous mode, written as users write such scripts.
set -xeuo pipefail

project_name='MATH'
exp_name="math-7B_async"
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${DATA_HOME}/models/Qwen2.5-Math-7B"}
TRAIN_FILE=${TRAIN_FILE:-"${DATA_HOME}/data/math.parquet"}
TEST_FILE=${DATA_HOME}/data/aime.parquet

rollout_mode="async"
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    return_raw_chat="True"
fi

max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8)) # tokens
gpus_rollout=12
total_rollout_steps=$(((512*100)))

ray job submit -- python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-name=fully_async_ppo_trainer \
    data.train_files="['${TRAIN_FILE}']" \
    data.val_files="${TEST_FILE}" \
    data.truncation='left' \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.train_batch_size=0 \
    data.gen_batch_size=1 \
    data.return_raw_chat=${return_raw_chat} \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=-1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.rollout.enable_chunked_prefill=True \
    critic.strategy=fsdp2 \
    trainer.logger=['console','tensorboard'] \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="${exp_name}" \
    trainer.test_freq=10 \
    trainer.save_freq=-1 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    rollout.nnodes=1 \
    rollout.n_gpus_per_node="${gpus_rollout}" \
    rollout.total_rollout_steps="${total_rollout_steps}" \
    async_training.staleness_threshold=0.5 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=2 \
    async_training.partial_rollout=True "$@" 2>&1 | tee run.log
