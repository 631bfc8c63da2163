from __future__ import annotations

from types import SimpleNamespace

import pytest
from kfp_server_api import ApiException
from tidemill_pipelines.service import Service, UnavailableError
from urllib3.exceptions import ProtocolError

from tidemill.errors import RunError


class Client:
    """KFP's client with the given answers, one for each request."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)

    def get_run(self, run_id: str) -> SimpleNamespace:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(state=answer)


def waited(client: Client, patience_s: float = 60.0) -> str:
    return Service(client, "http://kfp", None).wait("1a2b", poll_s=0.0, patience_s=patience_s)


def test_wait_outlives_a_server_that_is_away_for_some_minutes() -> None:
    away = [ProtocolError("gone"), ApiException(status=503), ApiException(status=429)]
    assert waited(Client("RUNNING", *away, "RUNNING", "SUCCEEDED")) == "SUCCEEDED"
    with pytest.raises(RunError, match="KFP at http://kfp refuses: 401"):
        waited(Client("RUNNING", ApiException(status=401), "SUCCEEDED"))
    assert Service(Client("CANCELING"), "http://kfp", None).wait("1a2b", limit_s=-1.0) == ""
    with pytest.raises(UnavailableError, match="KFP at http://kfp no longer answers: gone"):
        waited(Client("RUNNING", *away, "SUCCEEDED"), patience_s=-1.0)
