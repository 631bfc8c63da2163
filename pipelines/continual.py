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
from tidemill_pipelines.tasks import KEPT, Pod
from tidemill_pipelines.training import training_steps


@dsl.pipeline(
    name="continual",
    description="Scheduled reinforcement learning of the best model so far on new prompts",
    pipeline_config=dsl.PipelineConfig(ttl_seconds_after_finished=KEPT),
)
def continual(
    config: str,
    prompts: str,
    overrides: str = "",
    run_name: str = "",
    gpu_type: str = "",
    engines: int = 0,
    ranks: int = 0,
    image: str = "",
    gpu_hours: float = 0.0,
    store_secret: str = "tidemill-store",
    steps_image: str = IMAGE,
) -> None:
    """Train the champion on new prompts, and make the result the champion if it improved.

    Args:
        config: settings as YAML text, in a field of one line as JSON; or s3://BUCKET/KEY of such a file, with
            store.endpoint=http://HOST:PORT in the overrides.
        prompts: s3://BUCKET/PREFIX/ of .jsonl files whose names sort by date; the files after the last used one are
            trained, and without a new file the run ends at once. Or any source of prompts.
        overrides: settings that replace those in `config`, KEY.PATH=VALUE, one a line, or in one line
            [KEY.PATH=VALUE, KEY.PATH=VALUE].
        run_name: a run to resume. Empty starts a new run, named after the settings and this KFP run.
        gpu_type: value of the node label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3. Empty: as in `config`.
        engines: vLLM engines. 0: as in `config`.
        ranks: trainer processes, one GPU each. 0: as in `config`.
        image: image of the Ray pods, with a tag. Empty: as in `config`.
        gpu_hours: budget, at whose end the run stops with a checkpoint and a model. 0: as in `config`.
        store_secret: secret with access_key and secret_key of the object store.
        steps_image: image of the pipeline's own steps, with a tag.
    """
    pod, kfp_run = Pod(steps_image, store_secret), dsl.PIPELINE_JOB_ID_PLACEHOLDER
    name = {"config": config, "overrides": overrides, "run_name": run_name, "kfp_run": kfp_run}
    amounts = {"gpu_type": gpu_type, "engines": engines, "ranks": ranks, "image": image, "gpu_hours": gpu_hours}
    with dsl.ExitHandler(pod.retryable(teardown(**name, variants="")), name="run"):
        prepared = pod.task(prepare_continual(**name, **amounts, prompts=prompts)).outputs
        settings = prepared["settings"]
        # KFP's local runner inserts the value into the condition, which the line breaks of settings break, and finds no
        # output under another name than `Output`; in both cases the condition is false.
        with dsl.If(prepared["Output"] == "train", name="new-prompts"):
            summary, evaluation = training_steps(pod, settings)
            final = pod.retryable(register(config=settings, summary=summary, evaluation=evaluation)).outputs["Output"]
            pod.retryable(record_progress(config=settings, summary=final))
