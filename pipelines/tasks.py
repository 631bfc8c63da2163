"""What makes a component a task of a pipeline: never cached, and on Kubernetes a small pod with what it may use."""

from dataclasses import dataclass

from kfp import dsl, kubernetes

KEYS = {"access_key": "TIDEMILL_S3_ACCESS_KEY", "secret_key": "TIDEMILL_S3_SECRET_KEY"}
"""Keys of the store's secret, and the environment variables that they become."""
LOGIN = "tidemill-mlflow-login"
"""Secret with a name and a password for MLflow, where it asks for them; it need not be there."""
ACCOUNT = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
"""Keys of that secret, and the environment variables that MLflow's client reads."""
LABELS = {"TIDEMILL_WORKFLOW": "workflows.argoproj.io/workflow", "TIDEMILL_KFP_RUN": "pipeline/runid"}
"""Environment variables, and the labels that KFP puts on a pod: what owns the run's cluster, and whose run it is."""
USER = 1000
HOUR = 3600
LONGEST = 8 * 24 * HOUR
"""Seconds of the step that watches a training: a day more than `kubernetes.max_hours` by default."""
KEPT = 3 * 24 * HOUR
"""Seconds that a finished workflow, and whatever it owns, stays in the cluster; KFP keeps its own record."""
MEMORY = "2Gi"
RETRIES, BACKOFF, FACTOR, LONGEST_BACKOFF = 3, "5s", 4.0, "300s"


@dataclass(frozen=True)
class Pod:
    """What the pods of a pipeline's steps have in common.

    Attributes:
        image: of the steps.
        store_secret: secret with the keys of the object store.
    """

    image: str
    store_secret: str

    def task(self, task: dsl.PipelineTask, seconds: int = HOUR) -> dsl.PipelineTask:
        """The task, run every time, for at most so many seconds."""
        task.set_caching_options(False)
        task.set_container_image(self.image)
        task.set_cpu_request("250m").set_memory_request(MEMORY).set_memory_limit(MEMORY)
        # Without its secret a pod would wait for an hour and say nothing; optional, its step says what is missing.
        kubernetes.use_secret_as_env(task, secret_name=self.store_secret, secret_key_to_env=KEYS, optional=True)
        kubernetes.use_secret_as_env(
            task, secret_name=LOGIN, secret_key_to_env={name: name for name in ACCOUNT}, optional=True
        )
        for name, label in LABELS.items():
            kubernetes.use_field_path_as_env(task, env_name=name, field_path=f"metadata.labels['{label}']")
        kubernetes.set_timeout(task, seconds)
        kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
        kubernetes.add_pod_label(task, "app.kubernetes.io/part-of", "tidemill")
        kubernetes.add_pod_annotation(task, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false")
        return task

    def retryable(self, task: dsl.PipelineTask, seconds: int = HOUR) -> dsl.PipelineTask:
        """The task, tried again after a failure: it finds what the try before left and goes on from there."""
        return self.task(task, seconds).set_retry(
            num_retries=RETRIES, backoff_duration=BACKOFF, backoff_factor=FACTOR, backoff_max_duration=LONGEST_BACKOFF
        )
