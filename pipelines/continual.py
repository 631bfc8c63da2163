"""The pipeline for a schedule: trains the champion of the registry on the prompts that were added since.

    prepare_continual ─► if there are new prompts: provision ─► train ─► evaluate ─► register ─► record_progress
        └──────────────────────── exit handler: teardown ────────────────────────────┘

The first run starts from the model of the settings. A version becomes the champion if it is not worse than the model
from which its run started.
"""

from kfp import dsl
from tidemill_components import IMAGE
from tidemill_components.prepare_continual import prepare_continual
from tidemill_components.record_progress import record_progress
from tidemill_components.register import register
from tidemill_components.teardown import teardown
from tidemill_pipelines import form
from tidemill_pipelines.tasks import KEPT, Pod
from tidemill_pipelines.training import training_steps


@dsl.pipeline(
    name="continual",
    description="Scheduled reinforcement learning of the best model so far on new prompts",
    pipeline_config=dsl.PipelineConfig(ttl_seconds_after_finished=KEPT),
)
def continual(
    model: str = form.MODEL,
    prompts: str = form.TRAIN,
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
    config: str = "",
    overrides: str = "",
    run_name: str = "",
    store_secret: str = "tidemill-store",
    steps_image: str = IMAGE,
) -> None:
    """Train the champion on new prompts, and make the result the champion if it improved.

    Args:
        model: a Hugging Face name, s3://BUCKET/PREFIX or models:/NAME/VERSION.
        prompts: s3://BUCKET/PREFIX/ of .jsonl files whose names sort by date; the files after the last used one are
            trained, and without a new file the run ends at once. Or any source of prompts: s3://BUCKET/KEY of a .jsonl
            or .parquet file, hf://DATASET:SPLIT or reasoning_gym://TASK.
        data_held_out: prompts for scores only, in the forms of prompts; they decide which model is better.
        reward: exact_number, math_verify, reasoning_gym or package.module:function.
        trainer_steps: steps of the whole run.
        rollout_group_size: responses per prompt.
        trainer_learning_rate: peak learning rate.
        rollout_engines: vLLM engines, one GPU each.
        trainer_ranks: trainer processes, one GPU each.
        kubernetes_gpu_type: value of the node label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3. Empty: any.
        kubernetes_gpu_hours: budget, GPUs times hours; at its end the run stops with a checkpoint and a model.
        kubernetes_image: image of the Ray pods, with a tag. Empty: that of this version.
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
    with dsl.ExitHandler(pod.retryable(teardown(**name, variants="")), name="run"):
        prepared = pod.task(prepare_continual(**name, **fields, prompts=prompts)).outputs
        settings = prepared["settings"]
        # KFP's local runner inserts the value into the condition, which the line breaks of settings break, and finds no
        # output under another name than `Output`; in both cases the condition is false.
        with dsl.If(prepared["Output"] == "train", name="new-prompts"):
            summary, evaluation = training_steps(pod, settings)
            final = pod.retryable(register(config=settings, summary=summary, evaluation=evaluation)).outputs["Output"]
            pod.retryable(record_progress(config=settings, summary=final))
