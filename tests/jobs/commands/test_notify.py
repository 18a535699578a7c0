"""Word to the team: an address that is down, slow, or says anything else changes nothing about a cycle."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.commands.notify import MAX_TEXT, plain
from pipeline.core.errors import ConfigError
from tests.jobs.commands.test_cycle import Trnjobs, trnjobs

apprise = pytest.importorskip("apprise")
__all__ = ["trnjobs"]
SECRET = "T0-very-secret"


class Team:
    """What the addresses of a team have taken; those that are down take nothing."""

    def __init__(self) -> None:
        self.down, self.seen = set[str](), list[tuple[str, str]]()

    def titles(self) -> list[str]:
        return [title.partition(": ")[2] for title, _ in self.seen]

    def notify(self, sender: Any, *, title: str, body: str, body_format: str) -> bool:
        (url,) = (server.url() for server in sender)
        if is_taken := not any(host in url for host in self.down):
            self.seen.append((title, body))
        return is_taken


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Team:
    made = Team()
    monkeypatch.setattr(apprise.Apprise, "notify", lambda sender, **message: made.notify(sender, **message))
    monkeypatch.setenv("TEAM_URL", f"json://one.example/{SECRET}")
    return made


def told(run: Trnjobs, command: str, *words: str) -> tuple[int, str]:
    """Run `trnjobs` with an address; it is nowhere in what is printed and stored."""
    code, text = run(command, "--jobs.notify.url-variable=TEAM_URL", *words)
    files = [path for path in (run.place / "workspace").rglob("*") if path.is_file()]
    assert SECRET not in text and not any(SECRET in path.read_text(errors="replace") for path in files)
    return code, text


def test_the_ends_of_cycles(trnjobs: Trnjobs, team: Team) -> None:
    """Failed, then retried to a good end: the team hears of both, once each, however often somebody looks."""
    trnjobs.ends_with("train", 1)
    assert told(trnjobs, "submit")[0] == 1
    assert team.titles() == ["FAILED"]
    message = team.seen[-1][1]
    assert "train: exit code 1" in message and "trnjobs logs train" in message and "2026-11-20.html" in message
    for command in ("reconcile", "submit", "notify"):
        told(trnjobs, command)
    trnjobs.ends_with("train", 0)
    assert told(trnjobs, "retry")[0] == 0
    assert team.titles() == ["FAILED", "succeeded"]
    assert not list((trnjobs.place / "workspace" / "notify").rglob("*.json"))


def test_a_refusal_and_a_missed_deadline(trnjobs: Trnjobs, team: Team) -> None:
    """The deadline counts from when the cycle was claimed."""
    trnjobs.ends_with("train", 80)
    assert told(trnjobs, "submit", "--jobs.sla-s=3600")[0] == 80
    claim = trnjobs.place / "workspace/cycles/2026-11-20/jobs/claim.json"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"claimed_at": time.time() - 7200}))
    told(trnjobs, "retry")
    assert sorted(team.titles()) == ["refused", "refused", "the deadline has passed"]


def test_an_address_that_is_down_changes_nothing_and_holds_no_other(
    trnjobs: Trnjobs, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle ends as it ends; the message arrives at the next look once the address answers."""
    monkeypatch.setenv("TEAM_URL", f"json://one.example/{SECRET} json://two.example/{SECRET}")
    team.down = {"one.example"}
    trnjobs.ends_with("train", 1)
    code, text = told(trnjobs, "submit")
    assert (code, "did not accept a message" in text, team.titles()) == (1, True, ["FAILED"])
    assert trnjobs.status()["closed"]["outcome"] == "failed"
    assert told(trnjobs, "notify")[0] == 75
    team.down = set()
    for _ in range(2):
        told(trnjobs, "reconcile")
        assert team.titles() == ["FAILED", "FAILED"]


def test_a_test_message_to_a_secret_of_the_account(
    trnjobs: Trnjobs, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    def secret(name: str) -> str:
        if name != "team/webhook":
            raise ConfigError(f"secret {name}: ResourceNotFoundException")
        return f"json://one.example/{SECRET}\n"

    monkeypatch.setattr("jobs.targets.batch.client.secret_text", secret)
    assert trnjobs("notify", "--test", "--jobs.notify.url-secret=team/webhook")[0] == 0
    assert team.titles() == ["this is a test message"]
    trnjobs.expect(78, "ResourceNotFoundException", "notify", "--test", "--jobs.notify.url-secret=other")


@pytest.mark.parametrize(
    ("url", "words", "code"),
    [
        ("", ["--jobs.notify.url-variable=TEAM_URL"], 78),
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
