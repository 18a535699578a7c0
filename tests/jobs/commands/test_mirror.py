"""Cycles copied to MLflow and OpenLineage: everything once, and no cycle notices whether the other side is there."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from jobs.commands.mirror import StoredCycle
from pipeline.io.storage import Storage
from tests.jobs.commands.test_cycle import Trnjobs, trnjobs
from tests.kit.ports import free_port

__all__ = ["trnjobs"]
SAMPLE, DONE = Path(__file__).parents[2] / "old_workspace" / "workspace-70155e46.tar.gz", "2026-11-20"
CANDIDATE = "de25de337a9052b03faea2bb8a062b7ae400ecbe31eb1f65421b8a36d3796b11"
"""Digest of the checkpoint that the sample workspace has in production."""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with one whole cycle; neither side is configured."""
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "OPENLINEAGE_"))]:
        monkeypatch.delenv(name)  # the client of OpenLineage sets some, from its URL
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("OPENLINEAGE_CLIENT_LOGGING", "ERROR")
    return tmp_path / "ws"


Mirror = Callable[..., tuple[int, str]]


@pytest.fixture
def mirror(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Mirror:
    """Run `trnjobs mirror --to <system>`; return the exit code and what was printed."""

    def run(system: str, *words: str) -> tuple[int, str]:
        before = contents(workspace)
        code = cli.main(["mirror", "--to", system, "--workspace", str(workspace), *words])
        assert contents(workspace) == before, "it only reads"
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out + shown.err

    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".scratch" not in path.parts}


@contextmanager
def server(status: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every request with a status; the JSON bodies that it was sent."""
    bodies = list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}" if status == 200 else b"no")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", bodies
        finally:
            http.shutdown()


def nowhere() -> str:
    """Return an address at which nothing listens."""
    with server(200) as (address, _):
        pass
    return address


ADDRESS = {"mlflow": "MLFLOW_TRACKING_URI", "openlineage": "OPENLINEAGE_URL"}


@pytest.mark.parametrize("system", ADDRESS)
@pytest.mark.parametrize(("status", "code"), [(None, 75), (503, 75), (429, 75), (403, 78)])
def test_a_server_that_is_down_fails_or_refuses(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, system: str, status: int | None, code: int
) -> None:
    pytest.importorskip(system)
    if status is None:
        monkeypatch.setenv(ADDRESS[system], nowhere())
        seen, text = mirror(system)
    else:
        with server(status) as (address, _):
            monkeypatch.setenv(ADDRESS[system], address)
            seen, text = mirror(system)
    assert (seen, f"trnjobs mirror --to {system}" in text) == (code, True), text


@pytest.mark.parametrize("system", ADDRESS)
def test_what_is_not_configured_or_not_installed(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    for name in [name for name in sys.modules if name.startswith("jobs.commands.mirror_")]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, {"openlineage": "openlineage.client"}.get(system, system), None)
        code, text = mirror(system)
        assert code == 78 and f"pip install '{system}" in text.replace("mlflow-skinny", "mlflow")
    pytest.importorskip(system)
    code, text = mirror(system)
    assert code == 78 and ADDRESS[system] in text


def test_a_configuration_that_openlineage_cannot_read(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client")
    Path("openlineage.yml").write_text("transport:\n  type: file\n")
    code, text = mirror("openlineage")
    assert code == 78 and "log_file_path" in text
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    assert mirror("openlineage")[0] == 78


def test_a_cycle_does_not_notice(trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle runs to its end with both configured and down, and a copy that fails changes nothing of it."""
    for name in ADDRESS.values():
        monkeypatch.setenv(name, nowhere())
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert trnjobs("submit")[0] == 0
    before = contents(trnjobs.place / "workspace")
    for system in ADDRESS:
        pytest.importorskip(system)
        assert trnjobs("mirror", "--to", system)[0] == 75
    assert contents(trnjobs.place / "workspace") == before


# OpenLineage.


def to_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Configure a file of events; return a function that reads it."""
    pytest.importorskip("openlineage.client")
    Path("ol.yml").write_text("transport:\n  type: file\n  log_file_path: events.jsonl\n  append: true\n")
    monkeypatch.setenv("OPENLINEAGE_CONFIG", "ol.yml")
    return lambda: [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]


def versions(events: list[dict[str, Any]], side: str) -> dict[tuple[str, str], str]:
    """Return the version of each dataset by job and the last part of its name."""
    return {
        (event["job"]["name"], data["name"].rpartition("/")[2]): data["facets"]["version"]["datasetVersion"]
        for event in events
        for data in event[side]
    }


def test_lineage_of_a_cycle(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that one stage wrote are those that the next one read; sent again, the events are the same."""
    events = to_file(monkeypatch)
    assert "18 events sent" in mirror("openlineage", "--all")[1]
    first = events()
    assert Counter(event["eventType"] for event in first) == {"START": 9, "COMPLETE": 9}
    assert [event["eventTime"] for event in first] == sorted(event["eventTime"] for event in first)
    runs = {event["run"]["runId"] for event in first}
    assert len(runs) == 9 and {uuid.UUID(run).version for run in runs} == {5}
    parents = {event["run"]["facets"]["parent"]["run"]["runId"] for event in first if event["job"]["name"] != "cycle"}
    assert parents == {first[0]["run"]["runId"]}
    read, written = versions(first, "inputs"), versions(first, "outputs")
    assert written["train", "checkpoints"] == CANDIDATE == written["evaluate", "production.json"]
    assert {read[stage, "checkpoints"] for stage in ("evaluate", "embed", "verify")} == {CANDIDATE}
    assert written["prepare", "tiny"] == read["train", "tiny"] == read["evaluate", "tiny"]
    assert written["embed", "embeddings"] == read["verify", "embeddings"]
    assert mirror("openlineage")[0] == 0
    assert events() == [*first, *first]


def test_lineage_over_http(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client")
    with server(200) as (address, bodies):
        monkeypatch.setenv("OPENLINEAGE_URL", address)
        assert mirror("openlineage")[0] == 0
    assert len(bodies) == 18 and {body["job"]["namespace"] for body in bodies} == {"trnpipe"}


def test_lineage_of_a_job_that_failed_and_was_retried(trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch) -> None:
    events = to_file(monkeypatch)
    trnjobs.ends_with("train", 1)
    assert trnjobs("submit")[0] == 1
    assert trnjobs("mirror", "--to", "openlineage")[0] == 0
    failed = {event["job"]["name"]: event for event in events() if event["eventType"] == "FAIL"}
    assert failed.keys() == {"train", "cycle"}
    assert failed["train"]["run"]["facets"]["errorMessage"]["message"] == "exit 1"
    trnjobs.ends_with("train", 0)
    assert trnjobs("retry")[0] == 0
    assert trnjobs("mirror", "--to", "openlineage")[0] == 0
    ends = {event["run"]["runId"]: event["eventType"] for event in events() if event["job"]["name"] == "train"}
    assert sorted(ends.values()) == ["COMPLETE", "FAIL"]


# MLflow.


@pytest.fixture
def client(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow's store in SQLite."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workspace.parent}/mlflow.db")
    return mlflow.MlflowClient(f"sqlite:///{workspace.parent}/mlflow.db")


def only_run(client: Any) -> Any:
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


def histories(client: Any, run: Any) -> dict[str, list[tuple[int, float, int]]]:
    names = run.data.metrics
    return {
        name: [(each.step, each.value, each.timestamp) for each in client.get_metric_history(run.info.run_id, name)]
        for name in names
    }


def test_a_damaged_cycle_does_not_hide_the_others(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = list[str]()

    class Fake:
        def send(self, cycle: StoredCycle) -> str:
            sent.append(cycle.name)
            return "copied"

        def finish(self, storage: Storage) -> list[str]:
            return ["finished"]

    monkeypatch.setattr("jobs.commands.mirror._mirror_class", lambda name: Fake)
    claim = workspace / "cycles" / "bad" / "jobs" / "claim.json"
    claim.parent.mkdir(parents=True)
    claim.write_text("{")
    assert cli.main(["mirror", "--to", "mlflow", "--all", "--workspace", str(workspace)]) == 65
    shown = capsys.readouterr()
    assert sent == [DONE] and "skipping cycle bad" in shown.out and "finished" in shown.out


def check_run(client: Any, mirror: Mirror, workspace: Path) -> None:
    """Copy the cycle; see all of it there; copy it again and see nothing change."""
    code, text = mirror("mlflow", "--all")
    assert code == 0 and "model sample: version 1 is in production" in text, text
    run = only_run(client)
    assert (run.info.run_name, run.info.status) == (DONE, "FINISHED")
    assert run.data.tags["trnpipe.outcome"] == "succeeded"
    assert run.data.params["data.name"] == "tiny" and run.data.params["train.max_steps"] == "12"
    assert run.data.metrics["evaluate/ndcg_at_10"] == pytest.approx(0.5104539857115697)
    before = histories(client, run)
    assert [step for step, *_ in sorted(before["training/loss"])] == [*range(1, 13)]
    assert before["training/loss"][0][1] == pytest.approx(4.597694396972656)
    assert len({at_ms for _, _, at_ms in before["training/loss"]}) == 3, "the times of the three reports"
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["checkpoint.json", "report.html"]
    version = client.get_model_version_by_alias("sample", "production")
    assert version.run_id == run.info.run_id and version.tags["trnpipe.digest"] == CANDIDATE
    code, text = mirror("mlflow")
    assert code == 0 and f"already in run {run.info.run_id}" in text
    again = only_run(client)
    assert (again.data.to_dictionary(), histories(client, again)) == (run.data.to_dictionary(), before)
    assert len(client.search_model_versions("name = 'sample'")) == 1


def test_a_run_per_cycle(client: Any, mirror: Mirror, workspace: Path) -> None:
    check_run(client, mirror, workspace)


@pytest.mark.parametrize("method", ["log_batch", "log_text", "set_terminated", "set_tag", "create_model_version"])
def test_a_copy_that_was_interrupted_is_completed(
    client: Any, mirror: Mirror, workspace: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The call of `method` is carried out, but its answer is lost."""
    real = getattr(type(client), method)

    def lost(*args: Any, **more: Any) -> None:
        real(*args, **more)
        raise ConnectionError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(client), method, lost)
        assert mirror("mlflow")[0] == 75
    interrupted = histories(client, only_run(client))
    assert mirror("mlflow")[0] == 0
    run = only_run(client)
    after = histories(client, run)
    assert {name: points for name, points in after.items() if name in interrupted} == interrupted
    assert len(after["training/loss"]) == 12 and len(client.search_model_versions("name = 'sample'")) == 1


def test_production_that_was_not_copied_has_no_alias(client: Any, mirror: Mirror, workspace: Path) -> None:
    """An alias on a model that is not in production any more would be wrong."""
    from jobs.commands.mirror_mlflow import MLflowMirror
    from pipeline.io.storage import open_storage

    client.create_registered_model("sample")
    other = client.create_model_version("sample", "s3://bucket/other")
    client.set_registered_model_alias("sample", "production", other.version)
    (line,) = MLflowMirror().finish(open_storage(str(workspace)))
    assert f"trnjobs mirror --to mlflow --cycle {DONE}" in line
    assert client.get_registered_model("sample").aliases == {}
    assert mirror("mlflow")[0] == 0
    assert client.get_model_version_by_alias("sample", "production").tags["trnpipe.digest"] == CANDIDATE


@pytest.mark.slow
def test_a_real_server(mirror: Mirror, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("pandas", reason="the server needs all of mlflow, the client only mlflow-skinny")
    address = f"http://127.0.0.1:{free_port()}"
    words = ["--backend-store-uri", f"sqlite:///{workspace.parent}/server.db", "--workers", "1"]
    words += ["--artifacts-destination", str(workspace.parent / "artifacts"), "--port", address.rpartition(":")[2]]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (workspace.parent / "server.log").open("w") as log:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *words]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 400
            while not is_healthy(address):
                assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-2000:]
                time.sleep(0.5)
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            check_run(mlflow.MlflowClient(address), mirror, workspace)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
