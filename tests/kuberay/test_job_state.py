"""The state of an attempt for all states of RayJob, pods and events."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tidemill.kuberay.job_state import FAILURES, Phase, assess, fits_no_node

NOW = 1_800_000_000.0
OLD, FRESH, BEGAN = "2027-01-15T07:58:00Z", "2027-01-15T07:59:58Z", "2027-01-15T07:50:00Z"  # NOW is 08:00:00


def job(deployment: str = "", job_status: str = "", **status: Any) -> dict[str, Any]:
    told = {"jobDeploymentStatus": deployment, "jobStatus": job_status, **status}
    spec = {"rayClusterSpec": {"workerGroupSpecs": [{"replicas": 2}]}}
    return {"metadata": {"name": "run-a1", "creationTimestamp": BEGAN}, "spec": spec, "status": told}


def running(**status: Any) -> dict[str, Any]:
    return job("Running", "RUNNING", rayJobInfo={"startTime": "2027-01-15T07:55:00Z"}, **status)


def condition(kind: str, status: str, since: str = OLD, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": since, **more}


def pod(phase: str = "Running", node_type: str = "head", **status: Any) -> dict[str, Any]:
    whole = {"phase": phase, "startTime": OLD, "conditions": [condition("Ready", "True")], **status}
    metadata = {"name": f"run-{node_type}", "creationTimestamp": BEGAN, "labels": {"ray.io/node-type": node_type}}
    return {"metadata": metadata, "spec": {"containers": [{"resources": {}}]}, "status": whole}


def waiting(reason: str, message: str = "", since: str = OLD) -> dict[str, Any]:
    state = {"name": "ray", "image": "i:1", "state": {"waiting": {"reason": reason, "message": message}}}
    conditions = [condition("PodScheduled", "True")]
    return pod("Pending", "worker", startTime=since, containerStatuses=[state], conditions=conditions)


def without_node(message: str, since: str = OLD) -> dict[str, Any]:
    refused = condition("PodScheduled", "False", since, reason="Unschedulable", message=message)
    return pod("Pending", "worker", conditions=[refused])


def event(about: str, reason: str, message: str = "", kind: str = "Normal", count: int = 1) -> dict[str, Any]:
    involved = {"involvedObject": {"name": about}}
    return {"metadata": {"name": "e"}, "reason": reason, "message": message, "type": kind, "count": count, **involved}


HOPELESS = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
)
TAKEN = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint {a: b}. preemption: 0/2 "
    "nodes are available: 1 No preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling."
)


def test_a_missing_job_and_a_job_that_is_being_deleted_are_gone() -> None:
    leaving = running()
    leaving["metadata"]["deletionTimestamp"] = FRESH
    for gone in (None, leaving):
        state = assess(gone, [], [], NOW)
        assert (state.phase, state.over, state.retryable) == (Phase.GONE, True, False)


def test_a_job_that_succeeded_is_over_without_an_error() -> None:
    state = assess(job("Complete", "SUCCEEDED"), [], [], NOW)
    assert (state.phase, state.fatal, state.over) == (Phase.SUCCEEDED, None, True)


@pytest.mark.parametrize("reason", FAILURES)
def test_every_failure_reason_is_reported_with_its_message(reason: str) -> None:
    told, retryable = FAILURES[reason]
    state = assess(job("Failed", "FAILED", reason=reason, message="exit 1"), [], [], NOW)
    assert (state.phase, state.fatal, state.retryable) == (Phase.FAILED, f"{told}: exit 1", retryable)


def test_an_unknown_failure_reason_is_retryable() -> None:
    state = assess(job("Failed", "FAILED", reason="Odd"), [], [], NOW)
    assert (state.fatal, state.retryable) == ("the RayJob failed: Odd", True)


def test_a_job_that_kuberay_refuses_says_why() -> None:
    state = assess(job("ValidationFailed", reason="ValidationFailed", message="name too long"), [], [], NOW)
    assert (state.fatal, state.retryable) == ("KubeRay refuses the RayJob: name too long", False)


def test_a_driver_that_was_stopped_from_outside_has_failed() -> None:
    state = assess(job("Complete", "STOPPED"), [], [], NOW)
    assert state.phase is Phase.FAILED
    assert "ray job stop" in str(state.fatal)


def test_a_suspended_job_names_the_queue_it_waits_in() -> None:
    suspended = job("Suspended")
    suspended["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    state = assess(suspended, [], [], NOW)
    assert (state.phase, state.progress) == (Phase.QUEUED, "queued: waits for Kueue's queue gpus")
    fresh = copy.deepcopy(suspended) | {"status": {}, "spec": {"suspend": True}}
    assert assess(fresh, [], [], NOW).phase is Phase.QUEUED


def test_ready_pods_are_counted() -> None:
    state = assess(job("Initializing"), [pod(), pod("Pending", "worker", conditions=[])], [], NOW)
    assert (state.progress, state.over) == ("starting: 1 of 3 pods ready", False)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
def test_a_failing_image_pull_is_fatal_after_a_grace_period(reason: str) -> None:
    early = assess(job("Initializing"), [waiting(reason, "not found", FRESH)], [], NOW)
    assert (early.over, early.waiting) == (False, {"run-worker": f"{reason}: not found"})
    late = assess(job("Initializing"), [waiting(reason, "not found")], [], NOW)
    assert "cannot pull its image i:1" in str(late.fatal)
    assert not late.retryable


def test_a_missing_secret_is_named() -> None:
    state = assess(job("Initializing"), [waiting("CreateContainerConfigError", 'secret "s" not found')], [], NOW)
    assert 'secret "s" not found' in str(state.fatal)


def test_containers_that_are_being_created_are_not_fatal() -> None:
    state = assess(job("Initializing"), [waiting("ContainerCreating")], [], NOW)
    assert (state.over, state.waiting) == (False, {"run-worker": "its containers are being created"})


def test_a_volume_that_does_not_mount_is_reported_and_not_fatal() -> None:
    failed = event("run-worker", "FailedMount", 'secret "x" not found', "Warning")
    state = assess(job("Initializing"), [waiting("ContainerCreating")], [failed], NOW)
    assert (state.over, state.waiting) == (False, {"run-worker": 'FailedMount: secret "x" not found'})


def test_a_pod_that_fits_no_node_is_fatal_after_a_grace_period() -> None:
    assert not assess(job("Initializing"), [without_node(HOPELESS, FRESH)], [], NOW).over
    assert "no node can hold pod run-worker" in str(
        assess(job("Initializing"), [without_node(HOPELESS)], [], NOW).fatal
    )


def test_a_pod_whose_nodes_are_occupied_is_not_fatal() -> None:
    state = assess(job("Initializing"), [without_node(TAKEN)], [], NOW)
    assert (state.over, state.waiting) == (False, {"run-worker": f"Unschedulable: {TAKEN}"})


@pytest.mark.parametrize("reason", ["TriggeredScaleUp", "Nominated"])
def test_a_pod_for_which_a_node_is_being_added_is_not_fatal(reason: str) -> None:
    state = assess(job("Initializing"), [without_node(HOPELESS)], [event("run-worker", reason)], NOW)
    assert not state.over
    assert state.waiting["run-worker"].endswith("a node is being added")
    assert assess(job("Initializing"), [without_node(HOPELESS)], [event("other", reason)], NOW).over


@pytest.mark.parametrize(
    ("message", "never"),
    [
        (HOPELESS, True),
        (TAKEN, False),
        ("no nodes available to schedule pods", True),
        ("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.", True),
        ("0/1 nodes are available: 1 Insufficient memory.", False),
        ("0/1 nodes are available: 1 node(s) were unschedulable. preemption: 0/1 nodes are available: 1 Preemption "
         "is not helpful for scheduling.", False),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }. preemption: 0/1 "
         "nodes are available: 1 Preemption is not helpful for scheduling.", False),
        ("", False),
    ],
)  # fmt: skip
def test_the_message_of_the_scheduler_tells_never_from_not_yet(message: str, never: bool) -> None:
    assert fits_no_node(message) is never


def test_a_waiting_worker_does_not_end_a_running_job() -> None:
    state = assess(running(), [pod(), waiting("ErrImagePull"), without_node(HOPELESS)], [], NOW)
    assert (state.phase, state.over) == (Phase.RUNNING, False)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            'pods "h" is forbidden: exceeded quota: gpus, limited: 1',
            "exceeded quota: gpus, limited: 1. Wait for other runs",
        ),
        ('pods "h" is forbidden: violates PodSecurity "restricted:v1.34": x', "The namespace is stricter"),
        (
            'pods "h" is forbidden: service account n/a: serviceaccount "a" not found',
            "Create the account",
        ),
        ('pods "h" is forbidden: no PriorityClass with name p was found', "Create the class"),
    ],
)
def test_refused_pods_are_reported_from_the_condition_and_from_events(message: str, told: str) -> None:
    conditions = {"conditions": [condition("ReplicaFailure", "True", message=message)]}
    state = assess(job("Initializing", rayClusterStatus=conditions), [], [], NOW)
    assert told in str(state.fatal)
    failed = event("run-a1-x", "FailedToCreateHeadPod", message, "Warning", count=3)
    assert told in str(assess(job("Initializing", rayClusterName="run-a1-x"), [], [failed], NOW).fatal)
    assert not assess(job("Initializing", rayClusterName="another"), [], [failed], NOW).over


def test_a_new_refusal_is_not_fatal() -> None:
    conditions = {"conditions": [condition("ReplicaFailure", "True", FRESH, message="exceeded quota")]}
    assert not assess(job("Initializing", rayClusterStatus=conditions), [], [], NOW).over


def replaced() -> dict[str, Any]:
    head = pod()
    head["metadata"]["creationTimestamp"] = FRESH
    return head


def restarted() -> dict[str, Any]:
    last = {"terminated": {"reason": "OOMKilled", "finishedAt": FRESH}}
    return pod(containerStatuses=[{"name": "ray", "state": {"running": {}}, "lastState": last}])


def ended() -> dict[str, Any]:
    return pod("Failed", containerStatuses=[{"name": "ray", "state": {"terminated": {"reason": "OOMKilled"}}}])


def leaving() -> dict[str, Any]:
    head = pod()
    head["metadata"]["deletionTimestamp"] = FRESH
    return head


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        ([], "the head pod is gone"),
        ([leaving()], "the head pod is gone"),
        ([leaving(), replaced()], "the head pod was replaced"),
        ([restarted()], "restarted: OOMKilled"),
        ([ended()], "the head pod ended: OOMKilled"),
        ([pod(conditions=[condition("Ready", "False", BEGAN)])], "has not been ready for 120 s"),
    ],
)
def test_a_lost_head_is_retryable(heads: list[dict[str, Any]], told: str) -> None:
    state = assess(running(), heads, [], NOW)
    assert told in str(state.fatal)
    assert state.retryable


def test_a_head_that_fails_a_probe_or_has_no_driver_yet_is_not_lost() -> None:
    assert not assess(running(), [pod(conditions=[condition("Ready", "False", FRESH)])], [], NOW).over
    assert not assess(job("Running", ""), [], [], NOW).over


def handing_over(created: str) -> dict[str, Any]:
    submitter = pod()
    submitter["metadata"] = {"name": "run-submit", "creationTimestamp": created, "labels": {}}
    return submitter


def test_a_replaced_head_is_recognised_by_the_clock_of_the_api_server() -> None:
    """The node's clock is ten minutes behind, so the job seems to start before its head was created."""
    late = running() | {"status": running()["status"] | {"rayJobInfo": {"startTime": "2027-01-15T07:45:00Z"}}}
    assert not assess(late, [pod(), handing_over(BEGAN)], [], NOW).over
    assert "was replaced" in str(assess(late, [replaced(), handing_over(BEGAN)], [], NOW).fatal)


def test_a_submitter_that_is_being_deleted_is_ignored() -> None:
    old = handing_over("2027-01-15T07:00:00Z")
    old["metadata"]["deletionTimestamp"] = OLD
    assert not assess(running(), [pod(), old, handing_over(BEGAN)], [], NOW).over


def driver_ended(code: int) -> dict[str, Any]:
    words = (
        f"Job entrypoint command failed with exit code {code}, last available logs (truncated to 20,000 chars):\n"
        "2027-01-15 07:59:00,700\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
        "Running entrypoint for job run-a1-x: python3 -m tidemill.driver.job\nSignatureDoesNotMatch: check the keys\n"
    )
    return job("Failed", "FAILED", reason="AppFailed", message=words)


@pytest.mark.parametrize(("code", "retryable"), [(1, True), (-9, True), (2, False)])
def test_a_driver_that_ended_is_quoted_and_its_status_decides_about_a_retry(code: int, retryable: bool) -> None:
    state = assess(driver_ended(code), [], [], NOW)
    assert state.fatal == f"the driver failed: exit code {code}\nSignatureDoesNotMatch: check the keys"
    assert state.retryable == retryable


def test_events_of_an_earlier_job_with_this_name_are_ignored() -> None:
    said = event("run-a1", "FailedToCreateRayCluster", "exceeded quota: gpus", "Warning", count=9)
    before, after = said | {"lastTimestamp": "2027-01-15T07:49:59Z"}, said | {"lastTimestamp": FRESH}
    assert not assess(job("Initializing"), [], [before], NOW).over
    assert "exceeded quota" in str(assess(job("Initializing"), [], [after], NOW).fatal)
