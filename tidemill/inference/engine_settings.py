"""The settings of vLLM: memory, widths and precision."""

from __future__ import annotations

import os
from typing import Any

from tidemill.config.rollout import RolloutConfig
from tidemill.errors import ConfigError

GIB = 1 << 30
MAX_SEQUENCES = {"cpu": 128, "cuda": 1024}
# KV blocks of the CPU backend hold 128 tokens by default, and only whole blocks are shared: a group with a short prompt
# would compute it once for every sample. 32 is the smallest block size of its kernels.
CPU_BLOCK_SIZE = 32
# Tokens of one step. Groups with short prompts take a tenth less processor time than with vLLM's default of thousands.
CPU_STEP_TOKENS = 512
SINGLE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def engine_environment(rollout: RolloutConfig, gpus: int = 0) -> dict[str, str]:
    """Environment variables of the engine's process, which must be set before vLLM is imported."""
    import torch

    threads = rollout.threads or len(os.sched_getaffinity(0))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        # Idle threads that spin would take the cores from the trainer.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(rollout.start_timeout_s)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # Without it vLLM pins the threads of all engines and of the trainer to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if not gpus and not torch.cuda.is_available():
        # On the CPU, compilation takes 17 s, needs g++ at run time, and gains nothing.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment


def engine_settings(model_path: str, rollout: RolloutConfig, max_prompt_tokens: int, device: str) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`.

    Raises:
        ConfigError: prompt and response do not fit the model's context.
    """
    from tidemill.models.precision import compute_dtype

    context = context_length(model_path, max_prompt_tokens + rollout.max_new_tokens)
    settings = {
        "dtype": str(compute_dtype(rollout.dtype, device)).removeprefix("torch."),
        "max_model_len": context,
        "max_num_seqs": min(rollout.concurrent_samples_per_replica * rollout.group_size, MAX_SEQUENCES[device]),
        "tensor_parallel_size": rollout.tensor_parallel_size,
        # Log-probs after temperature, as the trainer computes them.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
    }
    if device == "cpu":
        return settings | cpu_settings(rollout, context)
    return settings | {"gpu_memory_utilization": rollout.gpu_memory_utilization}


def cpu_settings(rollout: RolloutConfig, context: int) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        # By default vLLM for the CPU runs the model in a process of its own below the scheduler: it takes 1 GiB more
        # memory and several more seconds to start, and is slower because of the messages between the two.
        **({} if rollout.tensor_parallel_size > 1 else {"distributed_executor_backend": SINGLE_PROCESS}),
        "block_size": CPU_BLOCK_SIZE,
        # A prompt is computed in one step. Splitting it rewinds the generator of a seeded request by an offset that CPU
        # generators do not support, and the engine crashes.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, context),
        "kv_cache_memory_bytes": int(rollout.cpu_kv_cache_gib * GIB),
    }


def context_length(model_path: str, wanted: int) -> int:
    """Length of the engine's context: `wanted` tokens and one more, which `score` samples and throws away."""
    from transformers import AutoConfig

    limit = int(AutoConfig.from_pretrained(model_path).get_text_config().max_position_embeddings)
    if wanted > limit:
        raise ConfigError(
            "data.max_prompt_tokens + rollout.max_new_tokens",
            wanted,
            f"at most the {limit} tokens of context of {model_path}",
            "Lower one of the two.",
        )
    return min(limit, wanted + 1)
