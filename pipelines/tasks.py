"""The pods of the pipeline steps: never cached, small, and with the secrets that they need."""

from dataclasses import dataclass

from kfp import dsl, kubernetes

KEYS = {"access_key": "TIDEMILL_S3_ACCESS_KEY", "secret_key": "TIDEMILL_S3_SECRET_KEY"}
"""Keys of the store's secret, and the environment variables for them."""
LOGIN = "tidemill-mlflow-login"
"""Optional secret with the user name and password of MLflow."""
ACCOUNT = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
"""Keys of that secret, which are also the environment variables of MLflow's client."""
LABELS = {"TIDEMILL_WORKFLOW": "workflows.argoproj.io/workflow", "TIDEMILL_KFP_RUN": "pipeline/runid"}
"""Environment variables, and KFP's pod labels for them: the owner of the run's cluster, and the KFP run."""
USER = 1000
HOUR = 3600
LONGEST = 8 * 24 * HOUR
"""Seconds of the training step: a day more than the default of `kubernetes.max_hours`."""
KEPT = 3 * 24 * HOUR
"""Seconds that a finished workflow and what it owns stay in the cluster; KFP keeps its own record. Has no effect in a
stock KFP, whose `workflow-controller-configmap` sets one hour."""
MEMORY = "2Gi"
RETRIES, BACKOFF, FACTOR, LONGEST_BACKOFF = 3, "5s", 4.0, "300s"


@dataclass(frozen=True)
class Pod:
    """The pods of a pipeline's steps.

    Attributes:
        image: of the steps.
        store_secret: secret with the keys of the object store.
    """

    image: str
    store_secret: str

    def task(self, task: dsl.PipelineTask, seconds: int = HOUR) -> dsl.PipelineTask:
        """The task with a pod, a time limit in seconds, and no cache."""
        task.set_caching_options(False)
        task.set_container_image(self.image)
        task.set_cpu_request("250m").set_memory_request(MEMORY).set_memory_limit(MEMORY)
        # A pod waits silently for a required secret; with an optional one its step reports what is missing.
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
        """The same for a task that is retried after a failure, because it continues from what the last try left."""
        return self.task(task, seconds).set_retry(
            num_retries=RETRIES, backoff_duration=BACKOFF, backoff_factor=FACTOR, backoff_max_duration=LONGEST_BACKOFF
        )
