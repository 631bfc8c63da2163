"""`tidemill submit` and `tidemill schedule` against a server that answers as KFP does, with a real object store."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_stub import CREATED, RUN_ID, Kfp, serving

from tidemill.cli.main import main
from tidemill.steps.request import DEFAULTS
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import start_server, stop_server

EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
ALONE = ["data.held_out=null", "evaluation.every=0", "registry.min_score=null"]
PROMPTS = '{"prompt": "1 + 1", "answer": "2"}\n'


@pytest.fixture
def kfp() -> Iterator[Kfp]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder = tmp_path_factory.mktemp("store")
    server = start_server(folder)
    yield ObjectStore.connect(server.endpoint, "tidemill", server.access_key, server.secret_key)
    stop_server(folder)


@pytest.fixture
def keys(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the store, in the environment as a person has them."""
    provider = store.client._provider.retrieve()
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", provider.access_key)
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", provider.secret_key)


@pytest.fixture
def run_file(tmp_path: Path, store: ObjectStore) -> str:
    """A run for Kubernetes whose prompts are files of this machine."""
    settings = yaml.safe_load(EXAMPLE.read_text())
    settings["cluster"] = {"provider": "kuberay"}
    settings["sync"] = {"transport": "object_store"}
    settings["store"] = {"endpoint": store.endpoint}
    settings["tracking"] = {"uri": "http://mlflow.tidemill.svc:5000"}
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(PROMPTS)
        settings["data"][name] = f"{name}.jsonl"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return str(tmp_path / "run.yaml")


def sent(kfp: Kfp) -> dict[str, Any]:
    """Parameters of the last run."""
    parameters: dict[str, Any] = kfp.runs[-1]["runtime_config"]["parameters"]
    return parameters


@pytest.mark.usefixtures("keys")
def test_submit_uploads_prompts_pipeline_and_settings_and_starts_the_run(
    kfp: Kfp, run_file: str, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", run_file, "trainer.steps=7", "--endpoint", kfp.endpoint]) == 0
    config = json.loads(sent(kfp)["config"])
    key = f"inputs/{hashlib.sha256(PROMPTS.encode()).hexdigest()}"
    assert config["data"]["train"] == f"s3://tidemill/{key}/train.jsonl"
    assert store.get_bytes(f"{key}/held_out.jsonl").decode() == PROMPTS
    assert (config["trainer"]["steps"], config["output"]) == (7, "/tmp/tidemill")
    [run] = kfp.runs
    assert (run["service_account"], run["experiment_id"]) == ("tidemill-pipeline", "e0")
    assert run["pipeline_version_reference"] == {"pipeline_id": "p0", "pipeline_version_id": "v0"}
    filled = {name for name, value in sent(kfp).items() if value}
    assert filled == {"config", "store_secret"} and set(sent(kfp)) == filled | set(DEFAULTS)
    out = capsys.readouterr().out
    assert f"run addition-1a2b3c4d: {kfp.endpoint}/#/runs/details/{RUN_ID}" in out
    assert "tidemill stop addition-1a2b3c4d" in out


@pytest.mark.usefixtures("keys")
def test_pipeline_is_uploaded_once_under_the_digest_of_its_content(kfp: Kfp, run_file: str) -> None:
    for _ in range(2):
        assert main(["submit", run_file, "--endpoint", kfp.endpoint]) == 0
    assert [pipeline["display_name"] for pipeline in kfp.pipelines] == ["tidemill-post-training"]
    assert len(kfp.versions) == 1 and len(kfp.experiments) == 1
    golden = (EXAMPLE.parents[1] / "pipelines/compiled/post_training.yaml").read_bytes()
    assert kfp.versions[0]["display_name"] == hashlib.sha256(golden).hexdigest()[:12]
    assert golden in kfp.bodies[-1]
    assert kfp.pipelines[0]["description"] == "Asynchronous reinforcement learning of a language model"
    assert "- **trainer_steps**: steps of the whole run." in kfp.versions[0]["description"]


@pytest.mark.usefixtures("keys")
def test_resumed_run_keeps_its_name(kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", run_file, "--resume", "addition-0f0f0f0f", "--endpoint", kfp.endpoint]) == 0
    assert sent(kfp)["run_name"] == "addition-0f0f0f0f"
    assert "run addition-0f0f0f0f: " in capsys.readouterr().out


@pytest.mark.usefixtures("keys")
def test_variants_make_a_sweep(kfp: Kfp, run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rates.txt").write_text("trainer.learning_rate=1e-5\ntrainer.learning_rate=2e-5 seed=3\n")
    assert main(["submit", run_file, "--variants", str(tmp_path / "rates.txt"), "--endpoint", kfp.endpoint]) == 0
    assert sent(kfp)["variants"] == (tmp_path / "rates.txt").read_text()
    assert "its runs are addition-1a2b3c4d-v1 to addition-1a2b3c4d-v2: tidemill status all" in capsys.readouterr().out
    assert kfp.pipelines[0]["display_name"] == "tidemill-sweep"


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(("state", "status"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 1)])
def test_waiting_tells_success_from_failure(
    kfp: Kfp, run_file: str, state: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    kfp.states = [state]
    assert main(["submit", run_file, "--wait", "--endpoint", kfp.endpoint]) == status
    assert f"run addition-1a2b3c4d: {state}" in capsys.readouterr().out


@pytest.mark.usefixtures("keys")
def test_store_that_is_not_seen_from_here_is_told_with_how_to_name_it(
    kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["submit", run_file, f"store.endpoint={away}", "--endpoint", kfp.endpoint]) == 1
        first = capsys.readouterr().err
        assert main(["submit", run_file, "--store-endpoint", away, "--endpoint", kfp.endpoint]) == 1
        second = capsys.readouterr().err
    assert all(f"cannot be uploaded: bucket tidemill: no S3 answer from {away}" in error for error in (first, second))
    assert "kubectl -n tidemill port-forward svc/store 9000" in first and "port-forward" not in second
    assert kfp.runs == []


def test_dry_run_shows_parameters_uploads_and_manifests_and_sends_nothing(
    kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", run_file, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# parameter config:" in out and "train.jsonl is uploaded to tidemill" in out
    assert yaml.safe_load(out)["kind"] == "RayJob"
    assert kfp.bodies == kfp.runs == []


@pytest.mark.usefixtures("keys")
def test_schedule_is_enabled_alone_without_catching_up_and_keeps_numbers(
    kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "schedule",
        run_file,
        "--cron",
        "0 2 * * *",
        "--name",
        "nightly",
        "--prompts",
        "s3://tidemill/prompts/",
    ]
    assert main([*arguments, "--endpoint", kfp.endpoint]) == 0
    [schedule] = kfp.schedules
    assert (schedule["mode"], schedule["no_catchup"], schedule["max_concurrency"]) == ("ENABLE", True, 1)
    assert schedule["trigger"] == {"cron_schedule": {"cron": "0 0 2 * * *"}}
    assert schedule["service_account"] == "tidemill-pipeline"
    assert schedule["runtime_config"]["parameters"]["prompts"] == "s3://tidemill/prompts/"
    assert json.loads(schedule["runtime_config"]["parameters"]["config"])["name"] == "addition"
    assert kfp.pipelines[0]["display_name"] == "tidemill-continual"
    out = capsys.readouterr().out
    assert "schedule nightly: " in out and out.count(" 02:00:00") == 3 and "UTC" in out


@pytest.mark.usefixtures("keys")
def test_schedules_are_listed_and_deleted_by_name(kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--endpoint", kfp.endpoint]
    assert main(["schedule", run_file, "--cron", "0 2 * * *", *at]) == 0
    assert main(["schedule", run_file, "--cron", "0 3 * * *", *at]) == 1
    assert "there is already a schedule addition" in capsys.readouterr().err
    assert main(["schedule", "--list", *at]) == 0
    assert capsys.readouterr().out == "addition  0 0 2 * * *  ENABLE\n"
    assert main(["schedule", "--delete", "nightly", *at]) == 1
    assert "no schedule 'nightly'; it has: addition" in capsys.readouterr().err
    assert main(["schedule", "--delete", "addition", *at]) == 0
    capsys.readouterr()
    assert main(["schedule", "--list", *at]) == 0
    assert capsys.readouterr().out == "KFP has no schedule\n"
    assert kfp.schedules == []
    assert kfp.actions == ["recurringruns/s0:disable", "recurringruns/s0:delete"]


def scheduled(kfp: Kfp, *states: str) -> list[str]:
    """A schedule with a run in these states, one for each request; returns the arguments that delete it."""
    kfp.schedules = [{"recurring_run_id": "s0", "display_name": "nightly", **CREATED}]
    for number in range(2):
        run = {"run_id": RUN_ID, "display_name": f"Run of {number}", "recurring_run_id": f"s{number}", **CREATED}
        kfp.runs.append(run)
    kfp.states = list(states)
    return ["schedule", "--delete", "nightly", "--endpoint", kfp.endpoint]


def test_a_schedule_whose_runs_go_on_is_disabled_and_stays(kfp: Kfp, capsys: pytest.CaptureFixture[str]) -> None:
    """KFP deletes the running workflow with its schedule: no exit handler runs, and the cluster keeps its GPUs."""
    assert main(scheduled(kfp, "RUNNING")) == 1
    assert kfp.actions == ["recurringruns/s0:disable"]
    out = capsys.readouterr().out
    page = f"{kfp.endpoint}/#/runs/details/{RUN_ID}"
    assert f"Run of 0 goes on; `tidemill status all` names it ...-1a2b3c4d: {page}\n" in out
    assert "It is not deleted, because KFP would delete its runs with it. --wait deletes it" in out
    assert "Run of 1" not in out


@pytest.mark.parametrize("option", ["--wait", "--stop"])
def test_a_schedule_is_deleted_after_its_runs_on_request(
    option: str, kfp: Kfp, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*scheduled(kfp, "RUNNING", "FAILED"), option]) == 0
    terminated = [f"runs/{RUN_ID}:terminate"] if option == "--stop" else []
    assert kfp.actions == ["recurringruns/s0:disable", *terminated, "recurringruns/s0:delete"]
    assert capsys.readouterr().out.endswith("deleted the schedule nightly\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "my_prompts/"], "--prompts = 'my_prompts/'. Allowed: s3://BUCKET/PREFIX/"),
        (["--prompts", "s3://tidemill/prompts"], "a folder of the store ends with a slash"),
        (["--prompts", "s3://a/b/", *ALONE], "data.held_out = null. Allowed: held-out prompts with"),
        (["--variants", "{folder}/empty.txt"], "variants = 0. Allowed: 1 to 32 variants"),
        (["data.train=gone.jsonl"], "gone.jsonl: no such file. Set data.train"),
        (["data.held_out=broken.jsonl"], "broken.jsonl:1: not valid JSON"),
    ],
)
def test_what_the_first_step_would_refuse_is_refused_before_anything_is_sent(
    words: list[str], message: str, run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("# none\n")
    (tmp_path / "broken.jsonl").write_text("{")
    assert main(["submit", run_file, "--dry-run", *(word.format(folder=tmp_path) for word in words)]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--list", "--delete", "a"],
        ["a.yaml", "--list"],
        ["--cron", "0 2 * * *"],
        ["a.yaml"],
        ["--list", "--wait"],
        ["--delete", "a", "--wait", "--stop"],
    ],
)
def test_schedule_does_one_thing_at_a_time(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *words, "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "Allowed: FILE with --cron, or --list, or --delete NAME with --wait" in capsys.readouterr().err


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("path", ["", "/nothing/here"])
def test_no_kfp_and_a_wrong_address_are_one_message(
    path: str, kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"{kfp.endpoint}{path}" if path else f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["submit", run_file, "--endpoint", endpoint]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and endpoint in error
    assert ("this is another server" if path else "port-forward") in error


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("endpoint", ["http://", "http://127.0.0.1:88x8", "http://127.0.0.1:99999", "https://[::1"])
def test_address_that_is_none_is_one_message(endpoint: str, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", run_file, "--endpoint", endpoint]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("tidemill: ") and "KFP" in error and endpoint in error


@pytest.mark.usefixtures("keys")
def test_token_is_not_shown_where_it_is_none(
    kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_KFP_TOKEN", "secret\nsecond line")
    assert main(["submit", run_file, "--endpoint", kfp.endpoint]) == 1
    error = capsys.readouterr().err
    assert "TIDEMILL_KFP_TOKEN holds something other than one line" in error and "secret" not in error
    monkeypatch.setenv("TIDEMILL_KFP_TOKEN", "token\n")  # as it stands in a file
    assert main(["submit", run_file, "--endpoint", kfp.endpoint]) == 0


@pytest.mark.usefixtures("keys")
def test_expired_token_is_named(kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    kfp.refusal = (401, "token expired")
    assert main(["submit", run_file, "--endpoint", kfp.endpoint]) == 1
    assert "refuses: 401 token expired; set TIDEMILL_KFP_TOKEN" in capsys.readouterr().err


@pytest.mark.usefixtures("keys")
def test_unknown_experiment_is_refused_with_those_there_are(
    kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kfp.experiments.append({"experiment_id": "e0", "display_name": "rl"})
    assert main(["submit", run_file, "--experiment", "lr", "--endpoint", kfp.endpoint]) == 1
    assert capsys.readouterr().err == "tidemill: KFP has no experiment 'lr'; it has: rl\n"
    assert kfp.runs == []


@pytest.mark.usefixtures("keys")
def test_what_kfp_refuses_is_told_in_its_words(kfp: Kfp, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    kfp.refusal = (403, "user anna may not\ncreate runs")
    assert main(["submit", run_file, "--endpoint", kfp.endpoint]) == 1
    assert capsys.readouterr().err == (f"tidemill: KFP at {kfp.endpoint} refuses: 403 user anna may not create runs\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", str(EXAMPLE)], "cluster.provider = 'local'. Allowed: kuberay"),
        (["submit", "RUN"], "--endpoint = null. Allowed: http(s)://HOST:PORT of KFP's API"),
        (["submit", "RUN", "--endpoint", "kfp:8888"], "--endpoint = 'kfp:8888'"),
        (["submit", "RUN", "model=/tmp"], "model = '/tmp'. Allowed: s3://"),
        (["submit", "RUN", "--variants", "gone.txt"], "--variants = 'gone.txt'"),
        (["submit", "RUN", "name=" + "a" * 55, "--endpoint", "http://kfp"], "name = 'aaa"),
        (["submit", "RUN", "--resume", "Bad Name", "--endpoint", "http://kfp"], "name = 'Bad Name'"),
        (["schedule", "RUN", "--cron", "0 25 * * *"], "cron = '0 25 * * *'. Allowed: hour from 0 to 23"),
        (["schedule", "RUN"], "Allowed: FILE with --cron, or --list"),
    ],
)
@pytest.mark.usefixtures("keys")
def test_what_cannot_be_submitted_is_refused_before_anything_is_sent(
    arguments: list[str],
    message: str,
    run_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT", raising=False)
    assert main([run_file if word == "RUN" else word for word in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
