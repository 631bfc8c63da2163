"""The Kubernetes kinds that a run is made of: the fields we use, under their names there.

`as_dict` writes an object as the API takes it; what is None is left out, so that the server's default holds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Labels = dict[str, str]
RestartPolicy = Literal["Always", "OnFailure", "Never"]


class Kind(BaseModel):
    """An object of the API, or a part of one; it refuses fields that it does not know."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def as_dict(self) -> dict[str, Any]:
        """As JSON, with the API's names."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class OwnerReference(Kind):
    """Whose end is the end of the object too; an Argo Workflow unless it says otherwise."""

    name: str
    uid: str
    api_version: str = "argoproj.io/v1alpha1"
    kind: str = "Workflow"


class Metadata(Kind):
    """Name and marks of an object, or the marks of a template's pods."""

    name: str | None = None
    namespace: str | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    owner_references: list[OwnerReference] | None = None


class Named(Kind):
    """A reference by name."""

    name: str


class SecretKey(Kind):
    """A key of a Secret."""

    name: str
    key: str


class ValueFrom(Kind):
    """Where the value of an environment variable comes from."""

    secret_key_ref: SecretKey


class EnvVar(Kind):
    """An environment variable: a value, or where it comes from."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class EnvFrom(Kind):
    """All keys of a Secret as environment variables."""

    secret_ref: Named


class Resources(Kind):
    """What a container is promised, and what it may not exceed."""

    requests: Labels
    limits: Labels


class Capabilities(Kind):
    """Linux capabilities."""

    drop: list[str]


class SecurityContext(Kind):
    """What a container may do; the defaults are those of the restricted pod security standard."""

    allow_privilege_escalation: bool = False
    run_as_non_root: bool = True
    capabilities: Capabilities = Capabilities(drop=["ALL"])
    read_only_root_filesystem: bool | None = None


class SeccompProfile(Kind):
    """System calls that are let through."""

    type: str


class PodSecurityContext(Kind):
    """As whom the containers of a pod run."""

    run_as_non_root: bool = True
    run_as_user: int
    run_as_group: int
    fs_group: int
    seccomp_profile: SeccompProfile = SeccompProfile(type="RuntimeDefault")


class EmptyDir(Kind):
    """A folder that lives as long as its pod, on disk or in memory."""

    medium: Literal["Memory"] | None = None
    size_limit: str | None = None


class Volume(Kind):
    """A folder of a pod; `projected` is a token of its service account with what is needed to use it."""

    name: str
    empty_dir: EmptyDir | None = None
    projected: dict[str, Any] | None = None


class VolumeMount(Kind):
    """Where a container sees a folder of its pod."""

    name: str
    mount_path: str
    read_only: bool | None = None


class Port(Kind):
    """A port under the name by which KubeRay finds it."""

    name: str
    container_port: int


class Exec(Kind):
    """A command that the kubelet runs in a container."""

    command: list[str]


class Hook(Kind):
    """What happens in a container at a turn of its life."""

    exec_: Annotated[Exec, Field(alias="exec")]


class Lifecycle(Kind):
    """The end of a container begins once `pre_stop` is done, or the grace period of its pod is over."""

    pre_stop: Hook


class Container(Kind):
    """A container; where no command is given, KubeRay makes one."""

    name: str
    image: str
    image_pull_policy: Literal["IfNotPresent"] = "IfNotPresent"
    command: list[str] | None = None
    ports: list[Port] | None = None
    env: list[EnvVar] | None = None
    env_from: list[EnvFrom] | None = None
    resources: Resources
    security_context: SecurityContext = SecurityContext()
    lifecycle: Lifecycle | None = None
    volume_mounts: list[VolumeMount] | None = None


class PodSpec(Kind):
    """A pod."""

    service_account_name: str
    automount_service_account_token: bool = False
    enable_service_links: bool = False
    restart_policy: RestartPolicy = "Never"
    termination_grace_period_seconds: int | None = None
    share_process_namespace: bool | None = None
    security_context: PodSecurityContext
    image_pull_secrets: list[Named] | None = None
    priority_class_name: str | None = None
    node_selector: Labels | None = None
    tolerations: list[dict[str, str | int]] | None = None
    containers: list[Container]
    volumes: list[Volume] | None = None


class PodTemplate(Kind):
    """What a controller makes pods from."""

    metadata: Metadata
    spec: PodSpec


class HeadGroup(Kind):
    """The head of a Ray cluster."""

    ray_start_params: Labels
    template: PodTemplate


class WorkerGroup(Kind):
    """Workers that are all alike."""

    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: Labels
    template: PodTemplate


class AutoscalerOptions(Kind):
    """The container beside Ray's head that makes and removes workers."""

    version: Literal["v2"] = "v2"
    idle_timeout_seconds: int
    image_pull_policy: Literal["IfNotPresent"] = "IfNotPresent"
    resources: Resources
    security_context: SecurityContext = SecurityContext()
    volume_mounts: list[VolumeMount]


class AuthOptions(Kind):
    """Whether Ray asks for a token, which KubeRay makes."""

    mode: Literal["token"] = "token"


class RayClusterSpec(Kind):
    """A Ray cluster."""

    ray_version: str
    auth_options: AuthOptions = AuthOptions()
    enable_in_tree_autoscaling: bool | None = None
    autoscaler_options: AutoscalerOptions | None = None
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class SubmitterConfig(Kind):
    """How often the pod that submits the job is tried again."""

    backoff_limit: int


class RayJobSpec(Kind):
    """A Ray cluster for one job."""

    entrypoint: str
    runtime_env_yaml: Annotated[str | None, Field(alias="runtimeEnvYAML")] = None
    submission_mode: Literal["K8sJobMode"] = "K8sJobMode"
    submitter_config: SubmitterConfig
    submitter_pod_template: PodTemplate
    backoff_limit: int
    shutdown_after_job_finishes: bool = True
    ttl_seconds_after_finished: int
    active_deadline_seconds: int
    pre_running_deadline_seconds: int
    suspend: bool | None = None
    ray_cluster_spec: RayClusterSpec


class RayJob(Kind):
    """A run of KubeRay."""

    api_version: str = "ray.io/v1"
    kind: str = "RayJob"
    metadata: Metadata
    spec: RayJobSpec
