"""KFP's API server: runs, schedules and versions of pipelines, through its client."""

import contextlib
import hashlib
import io
import json
import math
import os
import tempfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import kfp_server_api
from kfp import Client
from tidemill_pipelines.catalogue import Job, checked, compiled, pipeline_of, readme
from urllib3.exceptions import HTTPError

from tidemill.errors import RunError
from tidemill.retry import retrying, wait_for

HEALTH = "/apis/v2beta1/healthz"
TIMEOUT_S, POLL_S, PATIENCE_S = 10.0, 10.0, 600.0
BUSY = (0, 408, 429)
PAGE = 100
OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
TERMINATION_S = 7200.0
"""Longest time in which a terminated run ends: its exit handler has an hour."""
TOKEN = "TIDEMILL_KFP_TOKEN"
UI_ENDPOINT = "KF_PIPELINES_UI_ENDPOINT"
FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline 8888, then --endpoint http://127.0.0.1:8888"


class UnavailableError(RunError):
    """KFP does not answer, fails or is busy; the same request may succeed later."""


@dataclass(frozen=True)
class Created:
    """A run or a schedule that KFP has created: its id and the address of its page."""

    id: str
    page: str


@dataclass(frozen=True)
class ScheduledRun:
    """A run that a schedule has started: its id, its name in KFP, and the address of its page."""

    id: str
    name: str
    page: str


@dataclass(frozen=True)
class Schedule:
    """A recurring run of KFP."""

    id: str
    name: str
    mode: str
    cron: str


@dataclass(frozen=True)
class Service:
    """A KFP that answers.

    Attributes:
        client: KFP's own.
        endpoint: its address.
        namespace: of a user, where KFP has several; None where it has none.
    """

    client: Client
    endpoint: str
    namespace: str | None

    def run(self, job: Job) -> Created:
        """Start a run now."""
        made = self.client.run_pipeline(**self.arguments(job))
        return Created(made.run_id, self.page("runs", made.run_id))

    def schedule(self, job: Job, cron: str) -> Created:
        """Create a schedule: enabled, one run at a time, and none for times that were missed.

        Raises:
            RunError: the name is taken.
        """
        if any(each.name == job.name for each in self.schedules()):
            raise RunError(f"there is already a schedule {job.name}; delete it first, or choose another name")
        made = self.client.create_recurring_run(
            **self.arguments(job), cron_expression=cron, max_concurrency=1, no_catchup=True, enabled=True
        )
        return Created(made.recurring_run_id, self.page("recurringrun", made.recurring_run_id))

    def arguments(self, job: Job) -> dict[str, Any]:
        """What KFP's client takes for a run and for a schedule alike."""
        pipeline, version = self.version(job.pipeline)
        return {
            "experiment_id": self.experiment(job.experiment, create=job.create_experiment),
            "job_name": job.name,
            "pipeline_id": pipeline,
            "version_id": version,
            "params": checked(job.pipeline, job.parameters),
            "service_account": job.service_account,
        }

    def schedules(self) -> list[Schedule]:
        """All schedules."""
        found: list[Schedule] = []
        for page in self.pages(self.client.list_recurring_runs):
            for each in page.recurring_runs or []:
                cron = each.trigger.cron_schedule if each.trigger else None
                found.append(Schedule(each.recurring_run_id, each.display_name, each.mode, cron.cron if cron else ""))
        return found

    def pages(self, call: Callable[..., Any], **query: str) -> Iterator[Any]:
        """All pages of a list."""
        token: str | None = ""
        while token is not None:
            page = call(page_token=token, page_size=PAGE, namespace=self.namespace, **query)
            yield page
            token = page.next_page_token or None

    def disable_schedule(self, name: str) -> list[str]:
        """Disable all schedules of a name, so that they start no further run; returns their ids.

        Raises:
            RunError: there is none.
        """
        found = self.schedules()
        same = [each.id for each in found if each.name == name]
        if not same:
            names = ", ".join(sorted(each.name for each in found)) or "none"
            raise RunError(f"KFP has no schedule {name!r}; it has: {names}")
        for key in same:
            self.client.disable_recurring_run(key)
        return same

    def runs_of(self, schedule: str) -> list[ScheduledRun]:
        """The runs of a schedule that have not ended."""
        return [
            ScheduledRun(each.run_id, each.display_name, self.page("runs", each.run_id))
            for page in self.pages(self.client.list_runs, filter=equal("recurring_run_id", schedule))
            for each in page.runs or []
            if each.recurring_run_id == schedule and each.state not in OVER
        ]

    def terminate(self, run: str) -> None:
        """Terminate a run; its exit handler runs."""
        self.client.terminate_run(run)

    def delete_schedule(self, schedule: str) -> None:
        """Delete a schedule; KFP deletes the workflows of its runs too, without their exit handlers."""
        self.client.delete_recurring_run(schedule)

    def wait(
        self, run: str, *, limit_s: float = math.inf, poll_s: float = POLL_S, patience_s: float = PATIENCE_S
    ) -> str:
        """Wait for the end of a run; returns its state, one of `OVER`, or "" if it has not ended.

        Args:
            run: id of the KFP run.
            limit_s: longest wait in seconds.
            poll_s: seconds between two requests.
            patience_s: seconds for which KFP may be unavailable.

        Raises:
            RunError: KFP refuses, or is unavailable for longer.
        """

        def final_state() -> str:
            state: str = retrying(UnavailableError, patience_s, poll_s)(self.state, run)
            return state if state in OVER else ""

        return wait_for(final_state, limit_s, poll_s)

    def state(self, run: str) -> str:
        """State of a run."""
        with kfp_errors(self.endpoint):
            return str(self.client.get_run(run).state)

    def experiment(self, name: str, *, create: bool) -> str:
        """Id of an experiment, which is created if it does not exist and `create` is true.

        Raises:
            RunError: it does not exist.
        """
        try:
            found = self.client.get_experiment(experiment_name=name, namespace=self.namespace)
        except ValueError as error:
            if not create:
                known = self.client.list_experiments(page_size=PAGE, namespace=self.namespace).experiments or []
                names = ", ".join(sorted(each.display_name for each in known)) or "none"
                raise RunError(f"KFP has no experiment {name!r}; it has: {names}") from error
            found = self.client.create_experiment(name, namespace=self.namespace)
        return str(found.experiment_id)

    def version(self, pipeline: str) -> tuple[str, str]:
        """(pipeline id, version id) of a pipeline as it is compiled here; a new one is uploaded."""
        info = pipeline_of(pipeline).pipeline_spec.pipeline_info
        title = f"tidemill-{info.name}"
        text = compiled(pipeline)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pipeline.yaml"
            path.write_text(text, encoding="utf-8")
            pipelines = self.client.list_pipelines(filter=named(title), namespace=self.namespace).pipelines
            if not pipelines:
                pipelines = [self.client.upload_pipeline(str(path), title, info.description, self.namespace)]
            key = str(pipelines[0].pipeline_id)
            versions = self.client.list_pipeline_versions(key, filter=named(digest)).pipeline_versions
            if not versions:
                about = readme(pipeline)
                versions = [self.client.upload_pipeline_version(str(path), digest, key, description=about)]
            return key, str(versions[0].pipeline_version_id)

    def page(self, kind: str, key: str) -> str:
        """Address of a page of the KFP UI."""
        return f"{os.environ.get(UI_ENDPOINT, self.endpoint).rstrip('/')}/#/{kind}/details/{key}"


@contextlib.contextmanager
def connected(endpoint: str, namespace: str, *, debug: bool = False) -> Iterator[Service]:
    """Within the body KFP can be used, and its errors are ours.

    Args:
        endpoint: address of KFP's API.
        namespace: of a user, where KFP has several; else "".
        debug: whether KFP's client may print and warn.

    Raises:
        RunError: KFP does not answer, or refuses.
    """
    with contextlib.ExitStack() as stack:
        if not debug:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default" if debug else "ignore")
        stack.enter_context(kfp_errors(endpoint))
        token = token_of(os.environ.get(TOKEN, ""))
        # The client itself would try for half a minute, and then show a traceback.
        check_health(endpoint, token)
        client = Client(host=endpoint, namespace=namespace or "kubeflow", existing_token=token)
        yield Service(client, endpoint.rstrip("/"), namespace or None)


@contextlib.contextmanager
def kfp_errors(endpoint: str) -> Iterator[None]:
    """Raise the errors of KFP's client as ours.

    Raises:
        UnavailableError: KFP does not answer, fails or is busy.
        RunError: it refuses.
    """
    try:
        yield
    except kfp_server_api.ApiException as error:
        message = f"KFP at {endpoint} refuses: {reason_of(error)}"
        raise (UnavailableError if error.status in BUSY or error.status >= 500 else RunError)(message) from error
    except HTTPError as error:
        raise UnavailableError(f"KFP at {endpoint} no longer answers: {error}") from error
    except ValueError as error:
        raise RunError(str(error)) from error


def equal(key: str, value: str) -> str:
    """Filter for resources with this value of a field."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": key, "stringValue": value}]})


def named(name: str) -> str:
    """Filter for resources with this name."""
    return equal("display_name", name)


def token_of(text: str) -> str | None:
    """The token for KFP, None without one.

    Raises:
        RunError: it has characters that no token has; a later error would show it.
    """
    token = text.strip()
    if not (token.isascii() and token.isprintable()):
        raise RunError(f"{TOKEN} holds something other than one line of printable ASCII characters")
    return token or None


def check_health(endpoint: str, token: str | None) -> None:
    """Check that a KFP answers at an address.

    Raises:
        RunError: nothing answers, or another server does.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(endpoint.rstrip("/") + HEALTH, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        hint = f"set {TOKEN} to valid credentials" if error.code in (401, 403) else "this is another server"
        raise RunError(f"{endpoint} answers {error.code} {error.reason}: {hint}, or not the API of KFP") from error
    except urllib.error.URLError as error:
        raise RunError(f"no KFP answers at {endpoint}: {error.reason}. From outside the cluster: {FORWARD}") from error
    except TimeoutError as error:
        raise RunError(f"KFP at {endpoint} does not answer within {TIMEOUT_S:g} s") from error
    except (OSError, ValueError, HTTPException) as error:
        hint = f"If a login page is in front of it, set {TOKEN}"
        raise RunError(f"the server at {endpoint} is not the API of KFP: {error}. {hint}") from error


def reason_of(error: kfp_server_api.ApiException) -> str:
    """What the server says, in one line."""
    try:
        tree = json.loads(error.body)
        text = tree.get("message") or tree.get("error") or error.reason
    except (TypeError, ValueError, AttributeError):
        text = error.reason
    hint = f"; set {TOKEN} to a valid token" if error.status == 401 else ""
    return f"{error.status} {' '.join(str(text).split())}{hint}"
