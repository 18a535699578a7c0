"""What a team is told, from records alone; texts of others can do nothing in it."""

import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.config import NotifyConfig
from jobs.cycle import messages
from jobs.cycle.job_records import Closed, JobRecord
from jobs.cycle.messages import MAX_TEXT, Message, as_slack, messages_of, plain
from jobs.cycle.tables import NO_LOG
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import bad, good, tried
from tests.jobs.cycle.test_cost_ledger import ledger

ABOUT = Message(
    id="", event="test", at=50.0, pipeline="relevance", cycle="c", model="m", workspace="file:///w", text="", page="p"
)
SHAPE = plan(job("train"))
GOOD = good("train")


def told(record: JobRecord, closed: Closed | None, deadline_at: float | None = None, **more: object) -> list[Message]:
    given = {"round_": 1, "promoted": False, "failed_before": False, "retried_at": 3} | more
    outcome = closed.outcome if closed else None
    found = ledger(SHAPE, [record], outcome=outcome, deadline_at=deadline_at)
    return list(messages_of(ABOUT, found, [record], closed=closed, **given))  # type: ignore[arg-type]


def events(*given: object, **more: object) -> list[str]:
    return [message.event for message in told(*given, **more)]  # type: ignore[arg-type]


def test_ends() -> None:
    done = Closed(outcome="succeeded", at=60.0)
    assert events(GOOD, done, promoted=True) == ["promoted"]
    texts = [told(GOOD, done, promoted=True, without_comparison=one)[0].text for one in (False, True)]
    assert ["promoted WITHOUT a comparison" in text for text in texts] == [False, True]
    assert events(GOOD, done) == []  # nothing new: nobody is called
    assert events(GOOD, done, promoted=True, failed_before=True) == ["promoted", "recovered"]
    assert events(GOOD, done, round_=2) == ["recovered"]
    assert events(GOOD, Closed(outcome="refused", at=60.0, reason="x"), failed_before=True) == ["refused", "recovered"]
    assert events(bad("train", tried(1)), Closed(outcome="failed", at=60.0), failed_before=True) == ["failed"]
    assert events(GOOD, Closed(outcome="cancelled", at=60.0)) == []  # somebody did it


def test_while_it_runs() -> None:
    often = bad("train", *[tried(75)] * 3)
    assert [one.id for one in told(often, None)] == ["relevance/c/retried-train-3"]
    assert events(often, None, retried_at=4) == []
    again = told(often, None, round_=2, rounds={often.id: 2})
    assert [one.id for one in again] == ["relevance/c/retried-train-3-round-2"]
    assert [one.id for one in told(often, None, round_=2)] == ["relevance/c/retried-train-3"], "of a job of round 1"
    assert events(GOOD, None, 49.0) == ["late"] and events(GOOD, None, 51.0) == []
    late = told(GOOD, Closed(outcome="succeeded", at=60.0), 0.5, promoted=True)
    assert [one.event for one in late] == ["late", "promoted"] and "deadline MISSED" in late[1].text


HOSTILE = (
    "<script>alert(1)</script>",
    "<!channel> <@U1|x> <https://evil.example|page> & <!here>",
    "a\x00b\x1b[31mc\u202egpj.exe\u2066\u200f\r\nInjected: yes",
    "</script>{}\"'`*_~",
    "x" * 10_000,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_reasons(text: str) -> None:
    (message,) = told(bad("train", tried(1)), Closed(outcome="failed", at=60.0, reason=text))
    for line in (message.text, message.reason):
        assert len(line) <= MAX_TEXT and not any(unicodedata.category(one)[0] == "C" for one in line)
    slack = as_slack(message)["text"]
    assert "<" not in slack.replace("&lt;", "") and ">" not in slack.replace("&gt;", "")
    assert message.model_dump(mode="json")["reason"] == message.reason


BLOCK = "DataError: <!channel> has no `label`\n  next: --data.columns.label"


@pytest.mark.parametrize("outcome", ["failed", "refused"])
def test_the_error_of_the_failed_job_and_the_command_for_its_log_are_told(outcome: str) -> None:
    failed = bad("train", tried(65).model_copy(update={"error": BLOCK, "error_node": 3}))
    (message,) = told(failed, Closed(outcome=outcome, at=60.0, reason="train"))  # type: ignore[arg-type]
    assert (message.error, message.logs) == (BLOCK, "trnjobs logs train --workspace /w --cycle c --node 3")
    slack = as_slack(message)["text"]
    assert "```DataError: &lt;!channel&gt; has no 'label'\n" in slack and f"```{message.logs}```" in slack
    (gone,) = told(bad("train", tried(65)), Closed(outcome="failed", at=60.0))
    assert gone.error == NO_LOG


def test_a_message_of_a_job_without_an_error_of_its_own_has_none() -> None:
    (message,) = told(bad("train"), Closed(outcome="failed", at=60.0, reason="x"))
    assert (message.error, message.logs) == ("", "") and "```" not in as_slack(message)["text"]


@given(st.text())
@example("\u2028\u2029\x85\ufeff\ud800")
def test_plain_is_one_line(text: str) -> None:
    line = plain(text)
    assert not any(unicodedata.category(one)[0] == "C" for one in line) and len(line.splitlines()) <= 1
    assert plain(line) == line


def test_a_link_of_slack_cannot_be_left() -> None:
    page = as_slack(ABOUT.model_copy(update={"text": "x", "page": "https://a/b|c>d<!here>"}))["text"]
    assert page == "x <https://a/b%7Cc&gt;d&lt;!here&gt;|page>"
    assert as_slack(ABOUT.model_copy(update={"text": "x", "page": "file:///w"}))["text"] == "x (file:///w)"


def test_a_webhook_that_hangs_takes_nothing_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its share of the time; one that took a message does not get it again."""
    released, seen = threading.Event(), list[str]()

    def post(url: str, body: bytes, message_id: str) -> messages._Answer:
        released.wait(None if "hangs" in url else 0.02)
        seen.append(url)
        return messages._Answer()

    monkeypatch.setattr(messages, "_post", post)
    storage = open_storage(str(tmp_path))
    pending = messages.Pending(message=ABOUT.model_copy(update={"id": "relevance/c/test-1"}))
    storage.write_bytes(f"{messages.OUTBOX}/c/test-1.json", pending.model_dump_json().encode())
    hooks = {name: {"form": "json", "url_variable": name} for name in ("FIRST", "TEAM")}
    config = NotifyConfig.model_validate({"webhooks": hooks, "budget_s": 1.0})
    env = {"FIRST": "https://hangs.example/x", "TEAM": "https://team.example/x"}
    said = list[str]()
    for _ in range(3):
        assert messages.deliver(storage, config, env, lambda name: "", said.append) == 1
    assert seen == [env["TEAM"]]
    assert all("webhook FIRST failed" in line for line in said)
    released.set()


def test_without_time_nothing_is_sent() -> None:
    hook = NotifyConfig.model_validate({"webhooks": {"a": {"form": "json", "url_variable": "A"}}}).webhooks["a"]
    sender = messages._Sender(hook, {}, lambda name: "")
    assert sender.send(ABOUT, 0.0) == "no time was left for it"
