"""The pipeline of a sweep: runs that differ in some settings, of which the best is registered.

    validate_sweep ─► for each variant: provision ─► train ─► evaluate ─► finish_variant ─► select_best
        └─────────────────────── exit handler: teardown of all ────────────────┘

A variant whose training fails releases its cluster and fails the sweep. A sweep that is started again under the same
name skips the variants that are done.
"""

from kfp import dsl
from tidemill_components import IMAGE
from tidemill_components.finish_variant import finish_variant
from tidemill_components.select_best import select_best
from tidemill_components.teardown import teardown
from tidemill_components.validate_sweep import validate_sweep
from tidemill_pipelines import form
from tidemill_pipelines.tasks import KEPT, Pod
from tidemill_pipelines.training import training_steps

AT_ONCE = 4
"""Variants that run at the same time; KFP's local runner runs two."""


@dsl.pipeline(
    name="sweep",
    description="Several runs of asynchronous reinforcement learning, of which the best model is registered",
    pipeline_config=dsl.PipelineConfig(ttl_seconds_after_finished=KEPT),
)
def sweep(
    model: str = form.MODEL,
    data_train: str = form.TRAIN,
    data_held_out: str = form.HELD_OUT,
    reward: str = form.REWARD,
    trainer_steps: str = form.STEPS,
    rollout_group_size: str = form.GROUP_SIZE,
    trainer_learning_rate: str = form.LEARNING_RATE,
    rollout_engines: str = form.ENGINES,
    trainer_ranks: str = form.RANKS,
    kubernetes_gpu_type: str = "",
    kubernetes_gpu_hours: str = form.GPU_HOURS,
    kubernetes_image: str = "",
    variants: str = form.VARIANTS,
    config: str = "",
    overrides: str = "",
    run_name: str = "",
    store_secret: str = "tidemill-store",
    steps_image: str = IMAGE,
) -> None:
    """Train every variant, and register the one with the best held-out score if it improved.

    Args:
        model: a Hugging Face name, s3://BUCKET/PREFIX or models:/NAME/VERSION.
        data_train: prompts to train on: s3://BUCKET/KEY of a .jsonl or .parquet file, hf://DATASET:SPLIT or
            reasoning_gym://TASK. The default generates sums, without a download.
        data_held_out: prompts for scores only, in the forms of data_train. Its default is used
            with that of data_train only.
        reward: exact_number, math_verify, reasoning_gym or package.module:function.
        trainer_steps: steps of the whole run.
        rollout_group_size: responses per prompt.
        trainer_learning_rate: peak learning rate.
        rollout_engines: vLLM engines, one GPU each.
        trainer_ranks: trainer processes, one GPU each.
        kubernetes_gpu_type: value of the node label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3. Empty: any.
        kubernetes_gpu_hours: budget, GPUs times hours; at its end the run stops with a checkpoint and a model.
        kubernetes_image: image of the Ray pods, with a tag. Empty: that of this version.
        variants: [VARIANT, VARIANT], each with its overrides separated by spaces, such as
            [trainer.learning_rate=1e-5 seed=3, seed=4].
        config: empty for a run of this form alone. Or a run file: its text, in this field of one line as JSON;
            s3://BUCKET/KEY of it; or the name of an earlier run, whose settings are copied. A field that still
            has its default then leaves the setting to the run file.
        overrides: any settings besides, KEY.PATH=VALUE, several as [KEY.PATH=VALUE, KEY.PATH=VALUE].
        run_name: a run to resume. Empty starts a new run, named after the settings and this KFP run.
        store_secret: secret with access_key and secret_key of the object store.
        steps_image: image of the pipeline's own steps, with a tag.
    """
    pod, kfp_run = Pod(steps_image, store_secret), dsl.PIPELINE_JOB_ID_PLACEHOLDER
    name = {"config": config, "overrides": overrides, "run_name": run_name, "kfp_run": kfp_run}
    fields = {
        "model": model,
        "data_train": data_train,
        "data_held_out": data_held_out,
        "reward": reward,
        "trainer_steps": trainer_steps,
        "rollout_group_size": rollout_group_size,
        "trainer_learning_rate": trainer_learning_rate,
        "rollout_engines": rollout_engines,
        "trainer_ranks": trainer_ranks,
        "kubernetes_gpu_type": kubernetes_gpu_type,
        "kubernetes_gpu_hours": kubernetes_gpu_hours,
        "kubernetes_image": kubernetes_image,
    }
    with dsl.ExitHandler(pod.retryable(teardown(**name, variants=variants)), name="sweep"):
        settings = pod.task(validate_sweep(**name, **fields, variants=variants)).outputs["Output"]
        with dsl.ParallelFor(settings, name="variants", parallelism=AT_ONCE) as one:
            summary, evaluation = training_steps(pod, one)
            result = pod.retryable(finish_variant(config=one, summary=summary, evaluation=evaluation)).outputs["Output"]
        pod.retryable(select_best(**name, results=dsl.Collected(result)))
