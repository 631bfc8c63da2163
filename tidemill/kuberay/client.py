"""A client of a Kubernetes API server, from inside a pod or through a kubeconfig.

Only this file imports the Kubernetes client library, for credentials and connections.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3.exceptions import HTTPError, MaxRetryError

from tidemill.errors import ClusterError, ConfigError, RunError
from tidemill.kuberay.cluster import RAY_JOBS, Kind, Object, name_of

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
TIMEOUT = urllib3.Timeout(connect=5, read=30)
FOLLOW_TIMEOUT = urllib3.Timeout(connect=5, read=3600)
BUSY = frozenset({429, 500, 502, 503, 504})
RETRIES = urllib3.Retry(5, backoff_factor=0.5, status_forcelist=BUSY, allowed_methods=None, raise_on_status=False)
"""About 15 s. Every request may be sent twice: a repeated creation finds the object of the first one."""
PAGE = 500
ATTEMPTS = 3
TRANSIENT = BUSY | {408, 409, 410}
"""Statuses after which a later request may succeed."""
NO_LOG = (400, 404)  # the pod does not exist, or its container has not started
STRICT = {"fieldValidation": "Strict"}
INVALID = (400, 422)


class KubernetesCluster:
    """One namespace behind an API server; implements `cluster.Cluster`."""

    def __init__(self, namespace: str, client: ApiClient, retries: urllib3.Retry = RETRIES) -> None:
        self.namespace, self.client, self.retries = namespace, client, retries

    @classmethod
    def connect(cls, namespace: str, retries: urllib3.Retry = RETRIES) -> KubernetesCluster:
        """The cluster of KUBECONFIG, else the cluster of this pod, else the one of ~/.kube/config. Sends no request.

        Raises:
            ConfigError: there is no configuration, or it cannot be read.
        """
        configuration = Configuration()
        try:
            if TOKEN.is_file() and "KUBECONFIG" not in os.environ:
                load_incluster_config(client_configuration=configuration)
            else:
                load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
        except (ConfigException, OSError, ValueError) as error:
            fix = f"{str(error).rstrip('.')}. Set KUBECONFIG to the kubeconfig of the cluster."
            found = os.environ.get("KUBECONFIG")
            raise ConfigError("KUBECONFIG", found, "a readable kubeconfig", fix) from error
        return cls(namespace, ApiClient(configuration), retries)

    def create(self, kind: Kind, manifest: Object) -> Object:
        for _ in range(ATTEMPTS):
            status, body = self.post(kind, manifest, STRICT)
            if reason_of(body) != "AlreadyExists":
                created: Object = self.expect(status, body, f"create {kind}", kind)
                return created
            found = self.get(kind, name_of(manifest))
            if found is not None:
                return found
        raise RunError(f"{kind} {name_of(manifest)} was created and deleted by others {ATTEMPTS} times in a row")

    def dry_run_create(self, kind: Kind, manifest: Object) -> None:
        status, body = self.post(kind, manifest, STRICT | {"dryRun": "All"})
        if reason_of(body) != "AlreadyExists":
            self.expect(status, body, f"create {kind}", kind)

    def post(self, kind: Kind, manifest: Object, query: Mapping[str, str]) -> tuple[int, str]:
        status, body = self.ask("POST", kind, query=query, body=manifest)
        if status in INVALID and reason_of(body):
            raise ClusterError(
                f"the cluster refuses {kind} {name_of(manifest)}: {message_of(body).rstrip('. ')}. Correct the setting "
                "under `kubernetes` that this comes from."
            )
        return status, body

    def get(self, kind: Kind, name: str) -> Object | None:
        status, body = self.ask("GET", kind, name)
        if is_gone(status, body):
            return None
        found: Object = self.expect(status, body, f"get {kind}", kind)
        return found

    def list(self, kind: Kind, selector: str = "") -> list[Object]:
        found: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            status, body = self.ask("GET", kind, query=query)
            if status == 410 and "continue" in query:  # the continue token has expired
                del found[:], query["continue"]
                continue
            page = self.expect(status, body, f"list {kind}", kind)
            found.extend(page["items"])
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return found

    def patch(self, kind: Kind, name: str, change: Object) -> None:
        status, body = self.ask("PATCH", kind, name, body=change)
        if not is_gone(status, body):
            self.expect(status, body, f"patch {kind}", kind)

    def delete(self, kind: Kind, name: str) -> None:
        status, body = self.ask("DELETE", kind, name, body={"propagationPolicy": "Foreground"})
        if not is_gone(status, body):
            self.expect(status, body, f"delete {kind}", kind)

    def log(self, pod: str, container: str | None = None, lines: int = 100) -> str:
        response = self.open_log(pod, container, {"tailLines": str(lines)}, TIMEOUT)
        text: str = response.data.decode(errors="replace")
        if response.status in NO_LOG:
            return ""
        self.check(response.status, text, f"read the log of pod {pod}")
        return text

    def follow(self, pod: str, container: str | None = None) -> Iterator[str]:
        response = self.open_log(pod, container, {"follow": "true"}, FOLLOW_TIMEOUT)
        try:
            if response.status != 200:
                self.check(response.status, response.data.decode(errors="replace"), f"read the log of pod {pod}")
            rest = b""
            for chunk in response.stream(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except HTTPError as error:
            raise RunError(f"the log of pod {pod} broke off: {error}") from error
        finally:
            response.release_conn()

    def is_allowed(self, verb: str, kind: Kind) -> bool:
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural}
        if kind.namespaced:
            attributes["namespace"] = self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        reviews = Kind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False)
        status, body = self.ask("POST", reviews, body=review)
        return bool(self.expect(status, body, f"create {reviews}", reviews)["status"]["allowed"])

    def open_log(self, pod: str, container: str | None, query: Mapping[str, str], timeout: urllib3.Timeout) -> Any:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        return self.send("GET", path, {**query, **({"container": container} if container else {})}, None, timeout)

    def ask(
        self,
        method: str,
        kind: Kind,
        name: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
    ) -> tuple[int, str]:
        path = kind.path(self.namespace) + (f"/{name}" if name else "")
        response = self.send(method, path, query or {}, body, TIMEOUT)
        return response.status, response.data.decode(errors="replace")

    def send(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, timeout: urllib3.Timeout
    ) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json, */*", "Content-Type": kind}
        self.client.update_params_for_auth(headers, [], ["BearerToken"])
        host = self.client.configuration.host
        try:
            return self.client.rest_client.pool_manager.request(
                method,
                f"{host}{path}?{urlencode(query)}",
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout,
                retries=self.retries,
                preload_content=timeout is TIMEOUT,
            )
        except HTTPError as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            raise RunError(f"the Kubernetes API server at {host} does not answer: {cause}") from error

    def expect(self, status: int, text: str, what: str, kind: Kind) -> Any:
        if status == 404 and is_gone(status, text):
            raise ClusterError(
                f"cannot {what}: {message_of(text)}. Create it (k8s/ does), or correct kubernetes.namespace."
            )
        if status == 404:
            raise ClusterError(
                f"the cluster knows no {kind}: install {kind.provided_by}"
                + (" (docs/kubernetes.md says how)" if kind.group == RAY_JOBS.group else "")
            )
        self.check(status, text, what)
        return json.loads(text)

    def check(self, status: int, text: str, what: str) -> None:
        if 200 <= status < 300:
            return
        host, said = self.client.configuration.host, message_of(text)
        if status == 401:
            raise ClusterError(
                f"the Kubernetes API server at {host} does not accept the credentials: {said}. Renew them."
            )
        if status == 403 and "exceeded quota" in said:
            raise ClusterError(f"namespace {self.namespace} has no room: {said}")
        if status == 403 and "being terminated" in said:
            raise ClusterError(f"namespace {self.namespace} is being deleted: {said}. Create it again, or use another.")
        if status == 403:
            raise ClusterError(
                f"no permission to {what} in namespace {self.namespace}: {said}. k8s/ has a role for it."
            )
        if status in TRANSIENT:
            raise RunError(f"cannot {what}: the Kubernetes API server at {host} answers {status}: {said}")
        raise ClusterError(f"cannot {what} in namespace {self.namespace}: {said} ({status})")


def status_object(text: str) -> Mapping[str, Any]:
    """The `Status` object of an answer; empty if the answer is something else, such as a page of a proxy."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) and answer.get("kind") == "Status" else {}


def is_gone(status: int, text: str) -> bool:
    """Whether an answer says that the object does not exist; an unknown kind gives a 404 without an object's name."""
    return status == 404 and bool((status_object(text).get("details") or {}).get("name"))


def reason_of(text: str) -> str:
    return str(status_object(text).get("reason") or "")


def message_of(text: str) -> str:
    return str(status_object(text).get("message") or text.strip()[:500])
