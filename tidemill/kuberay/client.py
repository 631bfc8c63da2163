"""A Kubernetes cluster, reached as a pod of it or through a kubeconfig. Nothing else imports its client library."""

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
PATIENCE = urllib3.Retry(5, backoff_factor=0.5, status_forcelist=BUSY, allowed_methods=None, raise_on_status=False)
"""Some 15 s. Whatever we ask may be asked twice: a creation that is repeated finds what the first one made."""
PAGE = 500
TRIES = 3
PASSING = BUSY | {408, 409, 410}
"""Answers after which the same may be asked again."""
NO_LOG = (400, 404)  # of a pod that is gone, or whose container has not started


class KubernetesCluster:
    """One namespace behind an API server; implements `cluster.Cluster`.

    Args:
        namespace: of all that has one.
        client: address and credentials.
        patience: how often and after what a request is sent again.
    """

    def __init__(self, namespace: str, client: ApiClient, patience: urllib3.Retry = PATIENCE) -> None:
        self.namespace, self.client, self.patience = namespace, client, patience

    @classmethod
    def connect(cls, namespace: str, patience: urllib3.Retry = PATIENCE) -> KubernetesCluster:
        """The cluster of KUBECONFIG, else the one that this pod runs in, else that of ~/.kube/config.

        Nothing is sent yet.

        Raises:
            ConfigError: there is none of them, or it cannot be read.
        """
        configuration = Configuration()
        try:
            if TOKEN.is_file() and "KUBECONFIG" not in os.environ:
                load_incluster_config(client_configuration=configuration)
            else:
                load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
        except (ConfigException, OSError, ValueError) as error:
            fix = f"{str(error).rstrip('.')}. Name the cluster's kubeconfig in KUBECONFIG."
            found = os.environ.get("KUBECONFIG")
            raise ConfigError("KUBECONFIG", found, "a kubeconfig that can be read", fix) from error
        return cls(namespace, ApiClient(configuration), patience)

    def create(self, kind: Kind, manifest: Object) -> Object:
        """See `Cluster.create`."""
        for _ in range(TRIES):
            status, body = self.ask("POST", kind, body=manifest)
            if reason_of(body) != "AlreadyExists":
                made: Object = self.expect(status, body, f"create {kind}", kind)
                return made
            found = self.get(kind, name_of(manifest))
            if found is not None:
                return found
        raise RunError(f"{kind} {name_of(manifest)} was deleted {TRIES} times while it was looked at")

    def get(self, kind: Kind, name: str) -> Object | None:
        """See `Cluster.get`."""
        status, body = self.ask("GET", kind, name)
        if is_gone(status, body):
            return None
        found: Object = self.expect(status, body, f"get {kind}", kind)
        return found

    def list(self, kind: Kind, selector: str = "") -> list[Object]:
        """See `Cluster.list`."""
        found: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            status, body = self.ask("GET", kind, query=query)
            if status == 410 and "continue" in query:  # the list is too old to go on with
                del found[:], query["continue"]
                continue
            page = self.expect(status, body, f"list {kind}", kind)
            found.extend(page["items"])
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return found

    def patch(self, kind: Kind, name: str, change: Object) -> None:
        """See `Cluster.patch`."""
        status, body = self.ask("PATCH", kind, name, body=change)
        if not is_gone(status, body):
            self.expect(status, body, f"patch {kind}", kind)

    def delete(self, kind: Kind, name: str) -> None:
        """See `Cluster.delete`."""
        status, body = self.ask("DELETE", kind, name, body={"propagationPolicy": "Foreground"})
        if not is_gone(status, body):
            self.expect(status, body, f"delete {kind}", kind)

    def log(self, pod: str, container: str | None = None, lines: int = 100) -> str:
        """See `Cluster.log`."""
        response = self.open_log(pod, container, {"tailLines": str(lines)}, TIMEOUT)
        text: str = response.data.decode(errors="replace")
        if response.status in NO_LOG:
            return ""
        self.check(response.status, text, f"read the log of pod {pod}")
        return text

    def follow(self, pod: str, container: str | None = None) -> Iterator[str]:
        """See `Cluster.follow`."""
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

    def rehearse(self, kind: Kind, manifest: Object) -> None:
        """See `Cluster.rehearse`."""
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        status, body = self.ask("POST", kind, query=query, body=manifest)
        if status != 409:
            self.expect(status, body, f"create {kind}", kind)

    def may(self, verb: str, kind: Kind) -> bool:
        """See `Cluster.may`."""
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
        """A response with the log of a pod, to be closed."""
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
        """Status and text of an answer."""
        path = kind.path(self.namespace) + (f"/{name}" if name else "")
        response = self.send(method, path, query or {}, body, TIMEOUT)
        return response.status, response.data.decode(errors="replace")

    def send(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, timeout: urllib3.Timeout
    ) -> Any:
        """The answer of the API server, whatever its status.

        Raises:
            RunError: there is none.
        """
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
                retries=self.patience,
                preload_content=timeout is TIMEOUT,
            )
        except HTTPError as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            raise RunError(f"the Kubernetes API server at {host} does not answer: {cause}") from error

    def expect(self, status: int, text: str, what: str, kind: Kind) -> Any:
        """The object of an answer.

        Raises:
            ClusterError, RunError: it is none.
        """
        if status == 404 and is_gone(status, text):
            raise ClusterError(f"cannot {what}: {message_of(text)}. Make it (k8s/ does), or mend kubernetes.namespace.")
        if status == 404:
            raise ClusterError(
                f"the cluster knows no {kind}: install {kind.belongs_to}"
                + (" (docs/kubernetes.md says how)" if kind.group == RAY_JOBS.group else "")
            )
        self.check(status, text, what)
        return json.loads(text)

    def check(self, status: int, text: str, what: str) -> None:
        """Nothing, if an answer says that all is well.

        Raises:
            ClusterError: it refuses us for good.
            RunError: the server fails.
        """
        if 200 <= status < 300:
            return
        host, said = self.client.configuration.host, message_of(text)
        if status == 401:
            raise ClusterError(f"the Kubernetes API server at {host} does not know us: {said}. Renew the credentials.")
        if status == 403 and "exceeded quota" in said:
            raise ClusterError(f"namespace {self.namespace} has no room: {said}")
        if status == 403 and "being terminated" in said:
            raise ClusterError(f"namespace {self.namespace} is being deleted: {said}. Make it anew, or take another.")
        if status == 403:
            raise ClusterError(f"no permission to {what} in namespace {self.namespace}: {said}. k8s/ has the role.")
        if status in PASSING:
            raise RunError(f"cannot {what}: the Kubernetes API server at {host} answers {status}: {said}")
        raise ClusterError(f"cannot {what} in namespace {self.namespace}: {said} ({status})")


def is_gone(status: int, text: str) -> bool:
    """Whether an answer says that there is no object of this name; an unknown kind is something else."""
    if status != 404:
        return False
    try:
        return bool(json.loads(text).get("details", {}).get("name"))
    except (ValueError, AttributeError):
        return False  # a page of the server's own, as for an address that it does not know


def reason_of(text: str) -> str:
    """The one word by which the API server says why it refuses; "" where it does not."""
    try:
        answer = json.loads(text)
        return str(answer.get("reason", "")) if answer.get("kind") == "Status" else ""
    except (ValueError, AttributeError):
        return ""


def message_of(text: str) -> str:
    """What a refusal says."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500]
