"""The sections of a run's settings: every knob, typed and documented.

`docs/configuration.md` is generated from here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Cores = Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]  # a year, which every timer can hold
Fraction = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
RESOURCE = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_.-]*$"
BUCKET = r"^[a-z0-9][a-z0-9.-]+[a-z0-9]$"
REGISTERED = r"^[A-Za-z0-9._-]+$"
ALIAS = r"^[A-Za-z][A-Za-z0-9_-]*$"
TAGGED_IMAGE = r"^[^\s:@]+(:\d+/[^\s:@]+)?(:\w[\w.-]{0,127}|@sha256:[0-9a-f]{64})$"
ObjectName = Annotated[str, Field(pattern=OBJECT_NAME, max_length=253)]
RANKS_PER_POD = 8
"""Trainer ranks in one pod at most, as GPUs in a machine."""
OldLogProb = Literal["rollout", "version_start", "decoupled"]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def refuse_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        """`true` is not 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {get_args(part)[0] if get_origin(part) is Annotated else part for part in (kind, *get_args(kind))}
        if isinstance(value, bool) and kinds & {int, float}:
            raise PydanticCustomError("truth", "Input should be a number")
        return value


class DataConfig(Section):
    """Where prompts come from."""

    train: Text
    """Prompts to train on: a `.jsonl` or `.parquet` file (relative to the config file, or `s3://BUCKET/KEY` at
    `store.endpoint`), `hf://DATASET:SPLIT`, or `reasoning_gym://TASK`. The last two take options, of
    `datasets.load_dataset` and of `reasoning_gym.create_dataset`: `hf://openai/gsm8k:train?name=main`,
    `reasoning_gym://TASK?seed=2&size=50`."""
    held_out: Text | None = None
    """Prompts that are never trained, in the same forms; they score the policy before, during and after."""
    prompt_key: Text = "prompt"
    """Column of the question: a string, or a list of chat messages with `role` and `content`."""
    answer_key: Text = "answer"
    """Column of the reference answer, or `a.b` for a value in the mappings of column `a`; may be absent from the data.
    All other columns reach the rewards too."""
    system_prompt: str | None = None
    """System message before a string prompt; null leaves it to the model's chat template."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is skipped, counted and reported, never cut. With `rollout.max_new_tokens` it is the context
    that an engine reserves memory for."""
    shuffle: bool = True
    """Draw a new order of the rows every epoch, from `seed`."""
    epochs: Positive | None = None
    """Passes over the data; null repeats them until `trainer.steps` is reached."""


class RewardConfig(Section):
    """One reward function; a rollout's reward is the weighted sum of all of them."""

    function: Text
    """`exact_number` (the first number in the response against the answer), `math_verify`, `reasoning_gym`, `overlong`
    (soft punishment of long responses, with the options `budget`, `buffer` and `penalty`), or an import path
    `package.module:function`."""
    weight: Number = 1.0
    """Factor in the sum."""
    timeout_s: Seconds = 10.0
    """For all responses of a group together, which one process scores one after the other. What takes longer is killed
    with its process and counted; the group is tried again."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to every call."""


class RolloutConfig(Section):
    """How responses are sampled."""

    engines: Positive = 1
    """vLLM engine replicas, each a Ray actor."""
    tensor_parallel_size: Positive = 1
    """GPUs per engine."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses per prompt (n); a group needs at least two for its baseline."""
    max_new_tokens: Positive = 1024
    """Response budget in tokens."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature; log-probs are those of the tempered distribution on both sides."""
    stop: list[Text] = Field(default_factory=list)
    """Strings that end a response, besides the end-of-sequence token."""
    concurrent_samples_per_replica: Positive = 16
    """Groups in flight per engine (verl's samples are groups)."""
    total_rollout_steps: Positive | None = None
    """Groups that the whole run trains, as verl counts; sets `trainer.steps` where that is left out."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Engine precision; auto takes bfloat16 where the processor computes in it, else float32."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of a GPU's memory that vLLM takes."""
    cpu_kv_cache_gib: Positive = 1
    """KV cache of an engine on the CPU."""
    threads: Positive | None = None
    """OpenMP threads of an engine on the CPU; null takes all cores."""
    start_timeout_s: Seconds = 600.0
    """An engine that is not ready by then fails the run at its start. In place of one that died, it is tried again
    while others are at work, and fails the run where none is left."""
    group_timeout_s: Seconds = 600.0
    """A group that takes longer is cancelled and its prompt issued again."""
    max_attempts: Positive = 3
    """Failures after which a prompt is quarantined: set aside, counted and reported."""


class QueueConfig(Section):
    """Finished groups on their way to the trainer."""

    capacity: Positive | None = None
    """Groups held at most; null derives it from the staleness bound."""
    when_full: Literal["block", "drop_oldest"] = "block"
    """Block the rollouter, or drop the oldest group, count it and issue its prompt again."""


class AsynchronyConfig(Section):
    """How far generation may run ahead of training."""

    max_staleness: Count = 1
    """Hard bound on the age of any trained token, in policy versions; 0 is synchronous training."""
    staleness_threshold: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] | None = None
    """Also bound the groups between two weight syncs to `(1 + threshold)` times those that are trained, rounded down
    (verl). One that adds no whole group is the same as 0: nothing runs ahead; above `max_staleness` only `drop` makes
    use of one."""
    staleness_strategy: Literal["pace", "drop", "wait", "mask"] = "pace"
    """What keeps the bound: pace starts only what can be trained in time and cancels the few that are overtaken, drop
    starts what engines and queue hold and replaces what became too old, wait lets the trainer wait for the oldest,
    mask starts like pace and leaves the tokens that became too old out of the loss instead of cancelling."""
    trigger_parameter_sync_step: Positive = 1
    """Steps of the trainer between two weight syncs."""
    require_batches: Positive = 1
    """Mini-batches of `trainer.ppo_mini_batch_size` groups that a step of the trainer takes at once; it makes an
    optimizer step with each of them, in the order of their prompts."""
    partial_rollout: bool | None = None
    """What a weight sync does to groups in flight: true interrupts them, and the new version goes on from the tokens
    so far within the same budget; false lets them finish under the old version first. Null is false where
    `pause_mode` is wait, else true."""
    pause_mode: Literal["keep", "abort", "wait"] | None = None
    """How an engine pauses for new weights: keep goes on with the tokens and their KV, abort starts a new request
    from the tokens so far, wait lets requests finish first. Null is wait where `partial_rollout` is false, else
    keep."""


class AlgorithmConfig(Section):
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300) and the clipped surrogate loss of PPO
    (Schulman et al. 2017, arXiv:1707.06347).
    """

    normalize_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """The ratio is clipped above at 1 + clip_high; a larger value than clip_low is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 3.0
    """Bound of the loss for negative advantages (Ye et al. 2020, arXiv:1912.09729); null leaves it out."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(policy || reference); above 0 a frozen copy of the first policy is kept."""
    aggregation: Literal["token", "sequence"] = "token"
    """Average over all response tokens of the optimizer step, or first over each sequence."""
    old_log_prob: OldLogProb = "rollout"
    """What the ratio in the loss is taken to: `rollout`, the engine's log-probs at sampling; `version_start`, those of
    the parameters that the present version began with (verl's MIS); `decoupled`, those of the proximal policy, and the
    loss is weighted by proximal over sampling probability (Fu et al. 2025, arXiv:2505.24298, equation 5)."""
    proximal: Literal["exact", "loglinear"] = "exact"
    """Log-probs of the proximal policy of `old_log_prob: decoupled`: `exact`, by a forward pass of the parameters that
    the version began with; `loglinear`, between those at sampling and the present ones, by the token's version
    (Li et al. 2025, arXiv:2512.06547), without that pass and without a second copy of the parameters."""
    behaviour_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    """Largest weight of a token with `old_log_prob: decoupled`; above it is truncated. Null leaves it as it is."""

    @property
    def keeps_version_start(self) -> bool:
        """Whether the parameters that a version began with are asked for after its first step."""
        return self.old_log_prob != "rollout" and self.proximal == "exact"


class TrainerConfig(Section):
    """The optimizer and its steps."""

    steps: Positive
    """Steps of the whole run, each of `asynchrony.require_batches` optimizer steps; may be left out where
    `rollout.total_rollout_steps` is given."""
    ppo_mini_batch_size: Positive = 16
    """Groups (prompts) per mini-batch, that is per optimizer step."""
    ranks: Positive = 1
    """Trainer processes. Several share out the rows of a step, and each keeps its part of every parameter (FSDP)."""
    micro_batch_tokens: Positive = 4096
    """Tokens of packed groups in one forward pass; a longer group goes alone."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up; constant after."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Gradients are clipped to this global norm."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision over fp32 master weights; auto takes bfloat16 where the processor computes in it."""
    threads: Positive | None = None
    """Intra-op threads of a trainer rank on the CPU; null takes all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    get_timeout_s: Seconds = 1800.0
    """The trainer gives up when no full batch arrived by then, naming what is in flight."""


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["shared_memory", "object_store"] = "shared_memory"
    """`shared_memory` is a tensor file in memory that trainer and engines of one host map; `object_store` brings what
    changed through `store`, also to engines on other hosts."""
    full_every: Positive = 10
    """`object_store`: a full snapshot every so many versions, deltas in between; 1 sends everything every time."""
    timeout_s: Seconds = 300.0
    """An engine that takes longer to adopt a version is replaced, and a trainer that takes longer to publish it fails
    the run; `asynchrony.pause_mode: wait` adds `rollout.group_timeout_s`."""
    keep_prefix_cache: bool = False
    """Let a prompt go on from KV that older weights computed, which saves its prefill after a sync. New tokens, also
    those of held-out answers, are then sampled by a mixture of versions that no version of the trainer computes."""
    canary_max_gap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.5
    """After every sync the trainer's and the engine's log-probs of the same tokens may differ by this much in the
    mean, in nats; a wider gap fails the run. The first sync shows how much of a gap is rounding and lowers the bound to
    0.01 plus ten times that. Null skips the check."""


class EvaluationConfig(Section):
    """Scoring on held-out prompts, greedily."""

    every: Count = 0
    """Policy versions between two evaluations during training; 0 leaves only the ones before and after."""
    mode: Literal["blocking", "concurrent", "spare"] = "blocking"
    """`blocking` has the trainer wait for the score; `concurrent` answers held-out prompts, before rollouts, while
    training goes on, and only the next weight sync waits; `spare` sets one of several engines aside for it, which keeps
    its version meanwhile and catches up afterwards, so that nothing waits."""
    max_prompts: Positive | None = None
    """Prompts per evaluation; null takes all of `data.held_out`."""


class StoreConfig(Section):
    """S3 object store. Keys come from TIDEMILL_S3_ACCESS_KEY and TIDEMILL_S3_SECRET_KEY, never from here."""

    endpoint: str = "embedded"
    """`embedded` starts a server of its own below `output`; or the `http(s)://host:port` of any S3 server, which
    machines may share: no new run gets the name of another, and of two trainings under one name the newer goes on."""
    bucket: Annotated[str, Field(min_length=3, max_length=63, pattern=BUCKET)] = "tidemill"
    """Bucket for checkpoints and models; made if it does not exist."""


class CheckpointConfig(Section):
    """Atomic commits of everything a restart needs."""

    every: Count = 10
    """Policy versions between two checkpoints; 0 leaves only the one at the end."""
    keep: Positive = 2
    """Older committed checkpoints of this run are deleted."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the newest commit of a run with this name; `never` refuses to start if there is one."""


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = None
    """The `http(s)://host:port` of a tracking server, `databricks`, or a database as MLflow names it, such as
    `sqlite:///FILE`; null writes to an SQLite file below `output`. A password is refused: MLflow takes it from
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    experiment: Text = "tidemill"
    """Experiment that the runs stand in."""


class RegistryConfig(Section):
    """The gate before a model version is registered."""

    model: Annotated[str, Field(pattern=REGISTERED)] | None = None
    """Name of the registered model; null takes the run's `name`."""
    min_score: Number | None = None
    """Held-out score that the policy must reach; null asks only that it did not get worse."""
    alias: Annotated[str, Field(pattern=ALIAS)] = "candidate"
    """Alias that the new version gets; it also becomes the `champion` if it scores no less than the present one."""


class ClusterConfig(Section):
    """Where the run's Ray cluster comes from."""

    provider: Literal["local", "existing", "kuberay"] = "local"
    """`local` starts Ray on this machine for the run; `existing` joins the one at RAY_ADDRESS; `kuberay` has the
    operator of a Kubernetes cluster make one for the run, as `kubernetes` says."""


class HeadPod(Section):
    """The pod that holds the schedule of the run and Ray's own services; no actor is placed there."""

    cpus: Cores = 4
    """Cores that are promised; idle ones of the node may be used beyond that."""
    memory_gib: Annotated[int, Field(ge=2)] = 16
    """Memory. Ray's services and the driver take about 1 GiB in a small run, more with many pods: take 4 or more."""


class TrainerPod(Section):
    """A pod of trainer ranks, one GPU each. There is one up to 8 ranks, and one for every 8 beyond; the first also
    holds queue, rollouter and rewards. Their number is fixed for the run.
    """

    cpus: Cores = 16
    """Cores that are promised; idle ones of the node may be used beyond that."""
    memory_gib: Positive = 64
    """Memory, shared memory included."""
    shared_memory_gib: Positive = 16
    """Size of /dev/shm."""


class RolloutPod(Section):
    """A pod of one engine with `rollout.tensor_parallel_size` GPUs."""

    cpus: Cores = 8
    """Cores that are promised; idle ones of the node may be used beyond that."""
    memory_gib: Positive = 64
    """Memory, shared memory included."""
    shared_memory_gib: Positive = 16
    """Size of /dev/shm."""


class KubernetesConfig(Section):
    """The Ray cluster of `cluster.provider: kuberay`. Nothing here is a secret; secrets are named, never held."""

    namespace: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] = "tidemill"
    """Where the cluster is made; that of the pipeline's own pods, so that they can own it."""
    image: Annotated[str, Field(pattern=TAGGED_IMAGE)] = "tidemill-gpu:0.1.0"
    """Image of all Ray pods, with a tag other than `latest` or a digest."""
    image_pull_secrets: list[ObjectName] = Field(default_factory=list)
    """Secrets to pull the image with."""
    service_account: ObjectName = "tidemill-ray"
    """Service account of the pods; it needs no permission. No container sees its token but the autoscaler's, where the
    cluster grows and shrinks (`max_engines`)."""
    store_secret: ObjectName = "tidemill-store"
    """Secret with the keys `access_key` and `secret_key` of the object store."""
    secrets: list[ObjectName] = Field(default_factory=list)
    """Further secrets whose keys become environment variables of the Ray pods, such as HF_TOKEN."""
    env: dict[Annotated[str, Field(pattern=VARIABLE)], str] = Field(default_factory=dict)
    """Environment variables of the Ray pods; nothing secret, and none that a run sets itself."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment, for code that is not in the image: `working_dir`, `py_modules`, `pip`."""
    gpu_resource: Annotated[str, Field(pattern=RESOURCE)] | None = "nvidia.com/gpu"
    """Resource that a GPU is counted as; null runs on the CPU."""
    gpu_type: Annotated[str, Field(pattern=LABEL, max_length=63)] | None = None
    """Value of the node label `nvidia.com/gpu.product`, such as `NVIDIA-H100-80GB-HBM3`; null takes any."""
    max_engines: Positive | None = None
    """The rollout group grows from `rollout.engines` up to this while the trainer waits for groups, and shrinks again
    while generation waits for the trainer; null keeps `rollout.engines`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes for trainer and rollout pods."""
    tolerations: list[dict[str, str | int]] = Field(default_factory=list)
    """Taints that trainer and rollout pods tolerate, as in a pod: `key`, `operator`, `value`, `effect`."""
    trainer_priority_class: ObjectName | None = None
    """Priority class of head and trainer pods."""
    rollout_priority_class: ObjectName | None = None
    """Priority class of rollout pods, which a run can lose and replace."""
    queue: ObjectName | None = None
    """Kueue LocalQueue that admits the run; it is created suspended."""
    head: HeadPod = Field(default_factory=HeadPod)
    trainer: TrainerPod = Field(default_factory=TrainerPod)
    rollout: RolloutPod = Field(default_factory=RolloutPod)
    start_timeout_s: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """A cluster that does not run by then is deleted: no room, or a long image pull."""
    max_hours: Annotated[float, Field(gt=0, le=87_600, allow_inf_nan=False)] = 168.0
    """The whole cluster is deleted after this, whatever it does."""
    keep_s: Annotated[int, Field(ge=0, le=31_536_000)] = 300
    """Seconds that a finished cluster stays, so that its dashboard can be read."""
    gpu_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Budget of the run over all attempts, GPUs times hours of their pods; when it is used up the run commits a
    checkpoint, exports the model and ends, and says so. Null sets none."""
    pages: dict[str, str] = Field(default_factory=dict)
    """Addresses that a browser can open, for the page of links of a pipeline's first step: `ray`, `mlflow`, `store`."""
    max_restarts: Count = 3
    """New clusters for a run whose cluster failed in a way that may pass, such as a lost head pod."""
