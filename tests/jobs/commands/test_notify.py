"""Word to the team: a webhook that is down, slow, or says anything else changes nothing about a cycle."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jobs.cycle import messages
from pipeline.core.errors import ConfigError
from tests.jobs.commands.test_cycle import Trnjobs, trnjobs
from tests.jobs.targets.local.waiting import until

__all__ = ["trnjobs"]
SECRET = "T0-very-secret"


class Receiver(ThreadingHTTPServer):
    """Takes what it is sent. `answers`: to the next requests; the last is that to all later ones."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[tuple[int, dict[str, str]]] = [(200, {})]
        self.seen: list[dict[str, Any]] = []
        self.released = threading.Event()
        self.released.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"

    def ids(self) -> list[str]:
        return [message["id"].rpartition("/")[2] for message in self.seen]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == f"/{SECRET}"
        self.server.released.wait()
        status, headers = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if status == 200:
            self.server.seen.append(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def told(trnjobs: Trnjobs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> "Told":
    monkeypatch.setenv("TEAM_URL", receiver.url)
    monkeypatch.setattr(messages, "_wait", lambda state: 0.01)
    return Told(trnjobs, receiver)


class Told:
    """`trnjobs` with a webhook."""

    def __init__(self, run: Trnjobs, receiver: Receiver) -> None:
        self.run, self.receiver = run, receiver

    def __call__(self, *words: str, form: str = "json", **webhook: object) -> tuple[int, str]:
        hook = {"form": form, "url_variable": "TEAM_URL"} | webhook
        code, text = self.run(words[0], "--jobs.notify.webhooks", json.dumps({"team": hook}), *words[1:])
        assert SECRET not in text
        return code, text

    def files(self) -> list[Path]:
        return [path for path in (self.run.place / "workspace").rglob("*") if path.is_file()]


def test_the_ends_of_cycles(told: Told) -> None:
    """Failed, then retried to a good end: the team hears of both, once each, however often somebody looks."""
    told.run.ends_with("train", 75, 75, 1)
    code, _ = told("submit", "--jobs.notify.retried-at=2")
    assert code == 1
    assert told.receiver.ids() == ["retried-train-3", "failed-1"]
    failed = told.receiver.seen[-1]
    assert (failed["event"], failed["cycle"], failed["model"]) == ("failed", "2026-11-20", "relevance")
    assert "train: exit code 1" in failed["reason"] and failed["page"].endswith("reports/2026-11-20.html")
    for command in ("reconcile", "submit", "notify"):
        told(command, "--jobs.notify.retried-at=2")
    assert len(told.receiver.seen) == 2
    told.run.ends_with("train", 0)
    assert told("retry", "--jobs.notify.retried-at=2")[0] == 0
    assert told.receiver.ids()[2:] == ["recovered-2"]
    assert not list((told.run.place / "workspace" / "notify").rglob("*.json"))
    assert not any(SECRET in path.read_text(errors="replace") for path in told.files())


def test_the_cycle_before_is_told_by_time_and_not_by_name(told: Told) -> None:
    told.run.ends_with("train", 1)
    assert told("submit", "--cycle=run.10")[0] == 1
    told.run.ends_with("train", 0)
    assert told("submit", "--cycle=run.9")[0] == 0
    assert told("submit", "--cycle=run.11")[0] == 0
    assert told.receiver.ids() == ["failed-1", "recovered-1"]


def test_a_job_that_is_tried_again_in_a_later_round_is_told_of_again(told: Told) -> None:
    told.run.ends_with("train", 75, 75, 1)
    told("submit", "--jobs.notify.retried-at=2")
    assert told("retry", "--jobs.notify.retried-at=2")[0] == 1
    assert told.receiver.ids() == ["retried-train-3", "failed-1", "retried-train-3-round-2", "failed-2"]


def test_a_refusal_in_slack_s_form(told: Told) -> None:
    told.run.ends_with("train", 80)
    assert told("submit", "--jobs.notify.page-url=https://pages.example/r/", form="slack")[0] == 80
    (seen,) = told.receiver.seen
    assert "production is unchanged" in seen["text"]
    assert seen["text"].endswith(" <https://pages.example/r/2026-11-20.html|page>")


def test_only_the_events_that_were_asked_for(told: Told) -> None:
    told.run.ends_with("train", 1)
    told("submit", events=["refused", "late"])
    assert told.receiver.seen == []
    assert not list((told.run.place / "workspace" / "notify").rglob("*.json"))


TROUBLE: dict[str, list[tuple[int, dict[str, str]]]] = {
    "500": [(500, {})],
    "429": [(429, {"Retry-After": "3600"})],
    "redirect": [(302, {"Location": "https://elsewhere.example/"})],
    "404": [(404, {})],
    "down": [],
    "slow": [(200, {})],
}


@pytest.mark.parametrize("kind", TROUBLE)
def test_trouble_changes_nothing(told: Told, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cycle ends as it ends; the message arrives at the next look once the webhook is up."""
    told.run.ends_with("train", 1)
    told.receiver.answers = TROUBLE[kind] or [(200, {})]
    if kind == "down":
        monkeypatch.setenv("TEAM_URL", "http://127.0.0.1:9/" + SECRET)
    if kind == "slow":
        told.receiver.released.clear()
    code, text = told("submit", f"--jobs.notify.budget-s={1 if kind == 'slow' else 60}")
    assert code == 1
    assert "webhook team failed" in text and told.receiver.seen == []
    assert told.run.status()["closed"]["outcome"] == "failed"
    assert told.run.states()["train"] == "FAILED"

    monkeypatch.setenv("TEAM_URL", told.receiver.url)
    told.receiver.answers = [(200, {})]
    told.receiver.released.set()
    if kind == "slow":
        until(lambda: told.receiver.seen, "the request that nobody waits for any more")
    told("reconcile")
    assert set(told.receiver.ids()) == {"failed-1"}
    taken = len(told.receiver.seen)
    told("reconcile")
    assert len(told.receiver.seen) == taken


def test_a_server_that_answers_byte_by_byte(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within any time-out of one read; the command returns all the same."""
    ended = threading.Event()

    def drip(self: _Handler) -> None:
        while not ended.wait(0.05):
            self.wfile.write(b"H")

    monkeypatch.setattr(_Handler, "do_POST", drip)
    told.run.ends_with("train", 1)
    code, text = told("submit", "--jobs.notify.budget-s=1")
    ended.set()
    assert (code, "no answer within" in text) == (1, True)


def test_one_webhook_that_is_down_does_not_hold_the_other(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOWN_URL", "http://127.0.0.1:9/x")
    hooks = {"a": {"url_variable": "DOWN_URL"}, "b": {"url_variable": "TEAM_URL"}}
    told.run.ends_with("train", 1)
    told.run("submit", "--jobs.notify.webhooks", json.dumps(hooks))
    assert told.receiver.ids() == ["failed-1"]
    told.run("reconcile", "--jobs.notify.webhooks", json.dumps(hooks))
    assert told.receiver.ids() == ["failed-1"]  # b has had it
    monkeypatch.setenv("DOWN_URL", told.receiver.url)
    told.run("notify", "--jobs.notify.webhooks", json.dumps(hooks))
    assert told.receiver.ids() == ["failed-1", "failed-1"]


def test_late(told: Told) -> None:
    """Its deadline counts from when it was claimed; the cycle goes on, and is told of once."""
    told.run.ends_with("train", 1)
    told("submit")
    claim = told.run.place / "workspace/cycles/2026-11-20/jobs/claim.json"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"claimed_at": time.time() - 7200}))
    told.run.ends_with("train", 1)
    told("retry")
    assert "late-deadline" in told.receiver.ids() and "failed-2" in told.receiver.ids()


def test_a_test_message(told: Told) -> None:
    code, text = told("notify", "--test")
    assert (code, "delivered to team" in text) == (0, True)
    assert [one["event"] for one in told.receiver.seen] == ["test"]
    told.receiver.answers = [(403, {})]
    code, text = told("notify", "--test")
    assert (code, "answered 403" in text) == (75, True)


@pytest.mark.parametrize("url", ["", "http://hooks.example/x", "ftp://x/y", "no address"])
def test_an_address_that_is_none(told: Told, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("TEAM_URL", url)
    code, text = told("notify", "--test")
    assert code == 75
    assert f"TEAM_URL holds {'no https:// address' if url else 'nothing'}" in text
    assert not url or url not in text


def test_settings_that_cannot_be(trnjobs: Trnjobs) -> None:
    assert trnjobs("notify")[0] == 78
    for hook in (
        {},
        {"url_variable": "A", "url_secret": "b"},
        {"url_variable": "https://x"},
        {"url_secret": "http://x"},
    ):
        assert trnjobs("notify", "--jobs.notify.webhooks", json.dumps({"team": hook}))[0] == 78


def test_a_secret_of_the_account(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def secret(name: str) -> str:
        if name != "team/webhook":
            raise ConfigError(f"secret {name}: ResourceNotFoundException")
        return told.receiver.url + "\n"

    monkeypatch.setattr("jobs.targets.batch.client.secret_text", secret)
    assert told("notify", "--test", url_variable="", url_secret="team/webhook")[0] == 0
    code, text = told("notify", "--test", url_variable="", url_secret="other")
    assert (code, "ResourceNotFoundException" in text) == (75, True)
