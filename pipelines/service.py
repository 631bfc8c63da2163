"""KFP's API server: runs, schedules and versions of pipelines, through its client.

`python -m tidemill_pipelines.service ACTION` reads the arguments of an action as JSON and writes its result as JSON;
what goes wrong is one line on standard error and status 1.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import kfp_server_api
from kfp import Client, compiler
from tidemill_pipelines.catalogue import pipeline_of
from tidemill_pipelines.parameters import typed
from urllib3.exceptions import HTTPError

HEALTH = "/apis/v2beta1/healthz"
TIMEOUT_S, POLL_S, PATIENCE_S = 10, 10, 600
BUSY = (0, 408, 429)
PAGE = 100
OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
TOKEN = "TIDEMILL_KFP_TOKEN"
FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline 8888, then --endpoint http://127.0.0.1:8888"


class ServiceError(Exception):
    """What a person is told."""


@dataclass(frozen=True)
class Service:
    """A KFP that answers.

    Attributes:
        client: KFP's own.
        endpoint: its address.
        namespace: of a user, where KFP has several; "" where it has none.
    """

    client: Client
    endpoint: str
    namespace: str

    @classmethod
    def connect(cls, endpoint: str, namespace: str) -> "Service":
        """Knock first: the client itself would try for half a minute, and then show a traceback.

        Raises:
            ServiceError: nobody answers, or somebody else.
        """
        token = token_of(os.environ.get(TOKEN, ""))
        knock(endpoint, token)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            client = Client(host=endpoint, namespace=namespace or "kubeflow", existing_token=token)
        return cls(client, endpoint.rstrip("/"), namespace)

    def experiment(self, name: str, *, make: bool) -> str:
        """Id of an experiment.

        Args:
            name: of the experiment.
            make: whether to make it if it does not exist.

        Raises:
            ServiceError: it does not exist.
        """
        try:
            found = self.client.get_experiment(experiment_name=name, namespace=self.namespace or None)
        except ValueError as error:
            if make:
                found = self.client.create_experiment(name, namespace=self.namespace or None)
            else:
                known = self.client.list_experiments(page_size=PAGE, namespace=self.namespace or None).experiments or []
                names = ", ".join(sorted(each.display_name for each in known)) or "there is none"
                raise ServiceError(f"KFP has no experiment {name!r}; those there are: {names}") from error
        return str(found.experiment_id)

    def version(self, pipeline: str) -> tuple[str, str]:
        """(pipeline id, version id) of a pipeline as it is compiled here, which is uploaded if it is new."""
        name = pipeline_of(pipeline).pipeline_spec.pipeline_info.name
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "pipeline.yaml")
            compiler.Compiler().compile(pipeline_of(pipeline), package_path=path)
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()[:12]
            title = f"tidemill-{name}"
            found = self.pipeline(title)
            if found is None:
                found = str(self.client.upload_pipeline(path, title, namespace=self.namespace or None).pipeline_id)
            versions = self.client.list_pipeline_versions(found, filter=called(digest)).pipeline_versions or []
            if versions:
                return found, str(versions[0].pipeline_version_id)
            made = self.client.upload_pipeline_version(path, pipeline_version_name=digest, pipeline_id=found)
            return found, str(made.pipeline_version_id)

    def pipeline(self, title: str) -> str | None:
        """Id of a pipeline, None if there is no such one."""
        found = self.client.list_pipelines(filter=called(title), namespace=self.namespace or None).pipelines or []
        return str(found[0].pipeline_id) if found else None

    def ui(self, kind: str, key: str) -> str:
        """Address of a page."""
        return f"{os.environ.get('KF_PIPELINES_UI_ENDPOINT', self.endpoint).rstrip('/')}/#/{kind}/details/{key}"


def called(name: str) -> str:
    """Filter for what has this name."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})


def token_of(text: str) -> str | None:
    """The token for KFP, None without one.

    Raises:
        ServiceError: it is none; what would be raised later shows it.
    """
    token = text.strip()
    if not (token.isascii() and token.isprintable()):
        raise ServiceError(f"{TOKEN} holds something other than one line of letters, digits and signs")
    return token or None


def knock(endpoint: str, token: str | None) -> None:
    """See that a KFP answers at an address.

    Raises:
        ServiceError: nobody does, or somebody else.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(endpoint.rstrip("/") + HEALTH, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        refused = f"it wants other credentials: set {TOKEN}" if error.code in (401, 403) else "that is another server"
        raise ServiceError(
            f"{endpoint} answers {error.code} {error.reason}: {refused}, or not the API of KFP"
        ) from error
    except urllib.error.URLError as error:
        raise ServiceError(
            f"no KFP answers at {endpoint}: {error.reason}. From outside the cluster: {FORWARD}"
        ) from error
    except TimeoutError as error:
        raise ServiceError(f"KFP at {endpoint} does not answer within {TIMEOUT_S} s") from error
    except (OSError, ValueError, HTTPException) as error:
        raise ServiceError(
            f"what answers at {endpoint} is not the API of KFP: {error}. A login page may be before it: set {TOKEN}"
        ) from error


def run(service: Service, given: Mapping[str, Any]) -> dict[str, str]:
    """Start a run now."""
    pipeline, version = service.version(given["pipeline"])
    made = service.client.run_pipeline(
        experiment_id=service.experiment(given["experiment"], make=given["make_experiment"]),
        job_name=given["name"],
        pipeline_id=pipeline,
        version_id=version,
        params=typed(given["pipeline"], given["parameters"]),
        service_account=given["service_account"],
    )
    return {"id": made.run_id, "page": service.ui("runs", made.run_id)}


def schedule(service: Service, given: Mapping[str, Any]) -> dict[str, str]:
    """Start a run again and again: enabled, one at a time, and none for times that were missed."""
    if any(each["name"] == given["name"] for each in schedules(service, given)["schedules"]):
        raise ServiceError(f"there is a schedule {given['name']} already; delete it first, or name another")
    pipeline, version = service.version(given["pipeline"])
    made = service.client.create_recurring_run(
        experiment_id=service.experiment(given["experiment"], make=given["make_experiment"]),
        job_name=given["name"],
        cron_expression=given["cron"],
        max_concurrency=1,
        no_catchup=True,
        enabled=True,
        pipeline_id=pipeline,
        version_id=version,
        params=typed(given["pipeline"], given["parameters"]),
        service_account=given["service_account"],
    )
    return {"id": made.recurring_run_id, "page": service.ui("recurringrun", made.recurring_run_id)}


def schedules(service: Service, given: Mapping[str, Any]) -> dict[str, Any]:
    """The schedules there are."""
    del given
    found: list[Any] = []
    token = ""
    while True:
        page = service.client.list_recurring_runs(page_token=token, page_size=PAGE, namespace=service.namespace or None)
        found += page.recurring_runs or []
        token = page.next_page_token
        if not token:
            break
    rows = [
        {"id": each.recurring_run_id, "name": each.display_name, "mode": each.mode, "cron": cron_of(each)}
        for each in found
    ]
    return {"schedules": rows}


def cron_of(schedule: Any) -> str:
    """When it starts its runs."""
    cron = schedule.trigger.cron_schedule if schedule.trigger else None
    return cron.cron if cron else ""


def delete(service: Service, given: Mapping[str, Any]) -> dict[str, str]:
    """Remove a schedule by its name; runs that it started go on."""
    found = schedules(service, given)["schedules"]
    same = [each["id"] for each in found if each["name"] == given["name"]]
    if not same:
        names = ", ".join(sorted(each["name"] for each in found)) or "there is none"
        raise ServiceError(f"KFP has no schedule {given['name']!r}; those there are: {names}")
    for key in same:
        service.client.delete_recurring_run(key)
    return {"deleted": str(len(same))}


def wait(service: Service, given: Mapping[str, Any]) -> dict[str, str]:
    """Wait for the end of a run, which takes days: a server that is away for some minutes is no reason to give up."""
    heard = time.monotonic()
    while True:
        try:
            state = service.client.get_run(given["id"]).state
            heard = time.monotonic()
            if state in OVER:
                return {"state": state}
        except (HTTPError, kfp_server_api.ApiException) as error:
            if not passing(error) or time.monotonic() - heard > PATIENCE_S:
                raise
        time.sleep(POLL_S)


def passing(error: Exception) -> bool:
    """Whether an error says nothing of what was asked for: nobody answers, or the server fails or is busy."""
    return not isinstance(error, kfp_server_api.ApiException) or error.status in BUSY or error.status >= 500


ACTIONS = {"run": run, "schedule": schedule, "schedules": schedules, "delete": delete, "wait": wait}


def main(action: str) -> int:
    """Do one thing; returns the exit status."""
    given = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(
            sys.stderr if given.get("debug") else open(os.devnull, "w")
        ):  # the client prints
            result = ACTIONS[action](Service.connect(given["endpoint"], given["namespace"]), given)
    except ServiceError as error:
        message = str(error)
    except kfp_server_api.ApiException as error:
        message = f"KFP at {given['endpoint']} refuses: {said(error)}"
    except HTTPError as error:
        message = f"KFP at {given['endpoint']} does not answer any more: {error}"
    except ValueError as error:
        message = str(error)
    else:
        sys.stdout.write(json.dumps(result))
        return 0
    sys.stderr.write(f"{message}\n")
    return 1


def said(error: kfp_server_api.ApiException) -> str:
    """What the server said, in one line."""
    try:
        tree = json.loads(error.body)
        text = tree.get("message") or tree.get("error") or error.reason
    except (TypeError, ValueError, AttributeError):
        text = error.reason
    hint = f"; set {TOKEN} to one that is valid" if error.status == 401 else ""
    return f"{error.status} {' '.join(str(text).split())}{hint}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
