"""The pipeline of one run.

    validate ─► provision ─► train ─► evaluate ─► register
        └──────────── exit handler: teardown ────────┘

The same graph runs in the KFP local runner (`tidemill run`) and on a cluster. No step is cached, because every step has
side effects or depends on those of another.
"""

from kfp import dsl
from tidemill_components import IMAGE
from tidemill_components.register import register
from tidemill_components.teardown import teardown
from tidemill_components.validate import validate
from tidemill_pipelines.tasks import KEPT, Pod
from tidemill_pipelines.training import training_steps


@dsl.pipeline(
    name="post-training",
    description="Asynchronous reinforcement learning of a language model",
    pipeline_config=dsl.PipelineConfig(ttl_seconds_after_finished=KEPT),
)
def post_training(
    config: str,
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
    """Train a model with the settings in `config`, and register it if it improved.

    Args:
        config: settings as YAML text, in a field of one line as JSON; or s3://BUCKET/KEY of such a file, with
            store.endpoint=http://HOST:PORT in the overrides.
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
        settings = pod.task(validate(**name, **amounts)).outputs["Output"]
        summary, evaluation = training_steps(pod, settings)
        pod.retryable(register(config=settings, summary=summary, evaluation=evaluation))
