"""Validate a run."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def validate(
    config: str,
    overrides: str,
    run_name: str,
    kfp_run: str,
    model: str,
    data_train: str,
    data_held_out: str,
    reward: str,
    trainer_steps: str,
    rollout_group_size: str,
    trainer_learning_rate: str,
    rollout_engines: str,
    trainer_ranks: str,
    kubernetes_gpu_type: str,
    kubernetes_gpu_hours: str,
    kubernetes_image: str,
    links: dsl.Output[dsl.Markdown],
) -> str:
    """Check settings, prompts, rewards, model, store and capacity before the run uses a GPU.

    Args:
        config: settings, see `Request`; "" for those of the form.
        overrides: KEY.PATH=VALUE, one a line, or in one line [KEY.PATH=VALUE, ...].
        run_name: name of the run, "" for a new run.
        kfp_run: id of the KFP run.
        model: model.
        data_train: data.train.
        data_held_out: data.held_out.
        reward: the only reward function.
        trainer_steps: trainer.steps.
        rollout_group_size: rollout.group_size.
        trainer_learning_rate: trainer.learning_rate.
        rollout_engines: rollout.engines.
        trainer_ranks: trainer.ranks.
        kubernetes_gpu_type: kubernetes.gpu_type.
        kubernetes_gpu_hours: kubernetes.gpu_hours.
        kubernetes_image: kubernetes.image.
        links: gets the links to follow the run.

    Returns:
        The resolved settings as YAML text, with every default.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.validate import validate as step

    request = Request(
        config,
        overrides,
        run_name,
        kfp_run,
        model,
        data_held_out,
        reward,
        trainer_steps,
        rollout_group_size,
        trainer_learning_rate,
        rollout_engines,
        trainer_ranks,
        kubernetes_gpu_type,
        kubernetes_gpu_hours,
        kubernetes_image,
        data_train,
    )
    return step(request, links.path)
