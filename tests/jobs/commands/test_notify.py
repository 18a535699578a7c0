"""Word to the team: an address that is down, slow, or says anything else changes nothing about a cycle."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.commands.notify import MAX_TEXT, plain
from pipeline.core.errors import ConfigError
from tests.jobs.commands.test_cycle import Trnjobs, trnjobs

pytest.importorskip("apprise")
__all__ = ["trnjobs"]
SECRET = "T0-very-secret"


class Receiver(ThreadingHTTPServer):
    """Takes messages in Apprise's JSON form, and answers with `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.seen = 200, list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.server_port}/{SECRET}"

    def titles(self) -> list[str]:
        return [message["title"].partition(": ")[2] for message in self.seen]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            self.server.seen.append(body)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    server = Receiver()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TEAM_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()


def told(run: Trnjobs, command: str, *words: str) -> tuple[int, str]:
    """Run `trnjobs` with an address; it is nowhere in what is printed and stored."""
    code, text = run(command, "--jobs.notify.url-variable=TEAM_URL", *words)
    files = [path for path in (run.place / "workspace").rglob("*") if path.is_file()]
    assert SECRET not in text and not any(SECRET in path.read_text(errors="replace") for path in files)
    return code, text


def test_the_ends_of_cycles(trnjobs: Trnjobs, receiver: Receiver) -> None:
    """Failed, then retried to a good end: the team hears of both, once each, however often somebody looks."""
    trnjobs.ends_with("train", 1)
    assert told(trnjobs, "submit")[0] == 1
    assert receiver.titles() == ["FAILED"]
    message = receiver.seen[-1]["message"]
    assert "train: exit code 1" in message and "trnjobs logs train" in message and "2026-11-20.html" in message
    for command in ("reconcile", "submit", "notify"):
        told(trnjobs, command)
    trnjobs.ends_with("train", 0)
    assert told(trnjobs, "retry")[0] == 0
    assert receiver.titles() == ["FAILED", "succeeded"]
    assert not list((trnjobs.place / "workspace" / "notify").rglob("*.json"))


def test_a_refusal_and_a_missed_deadline(trnjobs: Trnjobs, receiver: Receiver) -> None:
    """The deadline counts from when the cycle was claimed."""
    trnjobs.ends_with("train", 80)
    assert told(trnjobs, "submit", "--jobs.sla-s=3600")[0] == 80
    claim = trnjobs.place / "workspace/cycles/2026-11-20/jobs/claim.json"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"claimed_at": time.time() - 7200}))
    told(trnjobs, "retry")
    assert sorted(receiver.titles()) == ["its deadline has passed", "refused", "refused"]


@pytest.mark.parametrize("status", [500, 302, 0])
def test_trouble_changes_nothing(
    trnjobs: Trnjobs, receiver: Receiver, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle ends as it ends; the message arrives at the next look once the address answers (0: it is down)."""
    trnjobs.ends_with("train", 1)
    receiver.status = status or 200
    if not status:
        monkeypatch.setenv("TEAM_URL", f"json://127.0.0.1:9/{SECRET}")
    code, text = told(trnjobs, "submit")
    assert (code, "did not take a message" in text, receiver.seen) == (1, True, [])
    assert trnjobs.status()["closed"]["outcome"] == "failed"
    assert told(trnjobs, "notify")[0] == 75
    monkeypatch.setenv("TEAM_URL", receiver.url)
    receiver.status = 200
    for _ in range(2):
        told(trnjobs, "reconcile")
        assert receiver.titles() == ["FAILED"]


def test_an_address_that_is_down_does_not_hold_the_other(
    trnjobs: Trnjobs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_URL", f"json://127.0.0.1:9/{SECRET} {receiver.url}")
    trnjobs.ends_with("train", 1)
    told(trnjobs, "submit")
    told(trnjobs, "reconcile")
    assert receiver.titles() == ["FAILED"]
    monkeypatch.setenv("TEAM_URL", f"{receiver.url} {receiver.url}")
    told(trnjobs, "reconcile")
    assert receiver.titles() == ["FAILED", "FAILED"]


def test_a_test_message_to_a_secret_of_the_account(
    trnjobs: Trnjobs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def secret(name: str) -> str:
        if name != "team/webhook":
            raise ConfigError(f"secret {name}: ResourceNotFoundException")
        return receiver.url + "\n"

    monkeypatch.setattr("jobs.targets.batch.client.secret_text", secret)
    assert trnjobs("notify", "--test", "--jobs.notify.url-secret=team/webhook")[0] == 0
    assert receiver.titles() == ["a test of trnjobs"]
    code, text = trnjobs("notify", "--test", "--jobs.notify.url-secret=other")
    assert (code, "ResourceNotFoundException" in text) == (75, True)


@pytest.mark.parametrize(
    ("url", "words", "code"),
    [
        ("", ["--jobs.notify.url-variable=TEAM_URL"], 75),
        ("no address", ["--jobs.notify.url-variable=TEAM_URL"], 75),
        ("", [], 78),
        ("", ["--jobs.notify.url-variable=A", "--jobs.notify.url-secret=b"], 78),
        ("", ["--jobs.notify.url-variable=http://x"], 78),
    ],
)
def test_addresses_that_are_none(
    trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch, url: str, words: list[str], code: int
) -> None:
    monkeypatch.setenv("TEAM_URL", url)
    found, text = trnjobs("notify", "--test", *words)
    assert found == code and (not url or url not in text)


@given(st.text())
def test_texts_of_others_are_one_line(text: str) -> None:
    found = plain(text)
    assert len(found) <= MAX_TEXT and len(found.splitlines()) <= 1 and plain(found) == found
