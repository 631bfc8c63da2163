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
    config: str,
    variants: str,
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
    """Train every variant, and register the one with the best held-out score if it improved.

    Args:
        config: settings as YAML text, in a field of one line as JSON; or s3://BUCKET/KEY of such a file, with
            store.endpoint=http://HOST:PORT in the overrides.
        variants: one a line, each with its overrides separated by spaces, such as
            trainer.learning_rate=1e-5 seed=3; or in one line [VARIANT, VARIANT].
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
    with dsl.ExitHandler(pod.retryable(teardown(**name, variants=variants)), name="sweep"):
        settings = pod.task(validate_sweep(**name, **amounts, variants=variants)).outputs["Output"]
        with dsl.ParallelFor(settings, name="variants", parallelism=AT_ONCE) as one:
            summary, evaluation = training_steps(pod, one)
            result = pod.retryable(finish_variant(config=one, summary=summary, evaluation=evaluation)).outputs["Output"]
        pod.retryable(select_best(**name, results=dsl.Collected(result)))
