"""What a team is told of a cycle: messages, the two forms a webhook takes them in, and their way there.

A message is made from records alone, so whoever looks at the cycle next makes the same one; its id says which it is.
Messages are kept in the workspace until every webhook has taken them, so that none is lost:

notify/<cycle>/<name>.json          what is still to be sent, and which webhooks have had it; gone when all have
cycles/<cycle>/jobs/told/<name>     the message was made: nobody makes it again

The first is written before the second, and both before the cycle is closed. A kill between a webhook's answer and the
note of it sends that message again, under the same id.

Sources: Slack's pages on incoming webhooks and on formatting (three characters are escaped; <!channel>, <@U1> and links
are written with them, so an escaped text holds none).
"""

import json
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal
from urllib.parse import urlsplit

import tenacity
import urllib3
from pydantic import Field

from jobs.config import NotifyConfig, NotifyEvent, Webhook
from jobs.cycle.cost_ledger import CycleLedger
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Closed, JobRecord
from jobs.cycle.job_states import failed_leaf, first_failure
from jobs.cycle.tables import DEADLINES, NO_LOG, logs_command, money
from pipeline.core.errors import ConfigError, DataError, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.core.progress import Say
from pipeline.core.record import Record
from pipeline.io.storage import Storage, read_record

MAX_TEXT = 1500
"""Characters of what others wrote: reasons of jobs, and of the gate."""


class Message(Record):
    """One thing that a team is told. Receivers drop doubles by `id`."""

    schema_version: Literal[1] = 1
    id: str = Field(description="pipeline/cycle/event-round, with the job where it is about one")
    event: NotifyEvent | Literal["test"]
    at: float = Field(description="When it happened, in seconds since 1970")
    pipeline: str
    cycle: str
    model: str
    workspace: str
    text: str = Field(description="One line, plain text without control characters")
    reason: str = Field("", description="Why the cycle ended so")
    error: str = Field("", description="What the log of the failed job says, in a few lines")
    logs: str = Field("", description="The command that shows this log")
    job: str = Field("", description="Of a job that was tried again")
    tries: int | None = None
    took_s: float | None = None
    usd: float | None = Field(None, description="Cost so far; null: a price is not known")
    page: str = Field("", description="Where the page of the cycle is")

    @property
    def name(self) -> str:
        """Of the file that keeps it, within its cycle."""
        return self.id.rpartition("/")[2]


def messages_of(
    about: Message,
    ledger: CycleLedger,
    records: Sequence[JobRecord],
    *,
    closed: Closed | None,
    round_: int,
    promoted: bool,
    without_comparison: bool = False,
    failed_before: bool,
    retried_at: int,
    rounds: Mapping[str, int] | None = None,
) -> Iterator[Message]:
    """Everything there is to tell of a cycle as it stands.

    Args:
        about: what all messages of this cycle share.
        round_: of submission, from 1: a cycle that is retried ends again.
        promoted: the gate let a new model into production in this cycle.
        without_comparison: nothing had judged that model.
        failed_before: the cycle before this one failed.
        retried_at: tries of a job that are worth a message.
        rounds: in which each job was submitted, by its id; 1 for those that are not there.
    """

    def message(event: NotifyEvent, text: str, *, of: str = "", **more: Any) -> Message:
        name, line = f"{about.pipeline}/{about.cycle}/{event}-{of or round_}", f"{about.pipeline} {about.cycle}: {text}"
        return about.model_copy(update={"id": name, "event": event, "text": plain(line), **more})

    for record in records:
        for leaf in record.leaves():
            if (tries := len(leaf.tries())) >= retried_at:
                where = leaf.name.replace(":", "-")
                text = f"{leaf.name} needed {tries} tries so far"
                at = leaf.tries()[-1].started_at or about.at
                own = (rounds or {}).get(record.id, 1)  # tries count from 1 in each round
                of = f"{where}-{tries}" + (f"-round-{own}" if own > 1 else "")
                yield message("retried", text, of=of, at=at, job=leaf.name, tries=tries)
    due, reached = ledger.deadline_at, closed.at if closed else about.at
    if due is not None and reached > due:
        yield message("late", "its deadline has passed", of="deadline", at=due)
    if closed is None:
        return
    took = None if ledger.began_at is None else closed.at - ledger.began_at
    why = plain(closed.reason)
    end: dict[str, Any] = {"at": closed.at, "took_s": took, "usd": ledger.total.usd, "reason": why}
    first = first_failure(records)
    if closed.outcome in ("failed", "refused") and first and (failed := failed_leaf(first)):
        error = failed.attempts[-1].error or NO_LOG
        end |= {"error": error[:MAX_TEXT], "logs": logs_command(failed, about.workspace, about.cycle)}
    facts = "; ".join(
        word for word in (f"took {format_duration(took)}", DEADLINES[ledger.deadline], money(ledger.total)) if word
    )
    if closed.outcome == "failed":
        yield message("failed", f"FAILED, {why} ({facts})", **end)
    elif closed.outcome == "refused":
        yield message("refused", f"the new model was refused, production is unchanged: {why} ({facts})", **end)
    elif closed.outcome == "succeeded" and promoted:
        doubt = ", promoted WITHOUT a comparison" if without_comparison else ""
        yield message("promoted", f"a new model is in production{doubt} ({facts})", **end)
    if closed.outcome in ("succeeded", "refused") and (failed_before or round_ > 1):
        yield message("recovered", f"works again, the cycle has ended: {closed.outcome} ({facts})", **end)


def plain(text: str) -> str:
    """One line without control, format and bidirectional characters, of at most MAX_TEXT characters."""
    words = "".join(" " if unicodedata.category(one)[0] in "CZ" else one for one in text).split()
    line = " ".join(words)
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def as_slack(message: Message) -> dict[str, Any]:
    """Of an incoming webhook: one line, the error of a failed job, and a link to the page."""
    text = escape(message.text, quote=False)
    if message.logs:  # nothing in it ends the block
        text += "".join(
            f"\n```{escape(one, quote=False).replace('`', chr(39))}```" for one in (message.error, message.logs)
        )
    if message.page.startswith(("https://", "http://")):
        text += f" <{escape(message.page, quote=False).replace('|', '%7C')}|page>"
    elif message.page:
        text += f" ({escape(message.page, quote=False)})"
    return {"text": text, "unfurl_links": False, "unfurl_media": False}


# On their way.

OUTBOX = "notify"
ANSWER_S = 5.0
"""For one answer."""
MAX_RETRY_AFTER_S = 5.0
_LOCAL = ("localhost", "127.0.0.1", "::1")


class Pending(Record):
    message: Message
    taken_by: tuple[str, ...] = Field((), description="Names of webhooks")


def put_messages(store: CycleStore, messages: Iterable[Message]) -> None:
    """Keep those that were never made before."""
    for message in messages:
        told = store.key(f"told/{message.name}")
        if store.storage.stat(told) is None:
            key = f"{OUTBOX}/{store.cycle}/{message.name}.json"
            store.storage.write_if_absent(key, Pending(message=message).model_dump_json(indent=1).encode())
            store.storage.write_if_absent(told, b"")


def deliver(
    storage: Storage, config: NotifyConfig, env: Mapping[str, str], secret_of: Callable[[str], str], say: Say
) -> int:
    """Send what waits, of all cycles, for `budget_s` at most; how many messages still wait.

    No webhook has more than its share of the time that is left, so one that hangs takes nothing from the others.

    Nothing that a webhook does or is makes this fail: what it did not take waits for the next look at any cycle.
    `secret_of`: name or ARN of a secret to its text.
    """
    until, waiting = time.monotonic() + config.budget_s, 0
    failed = dict[str, str]()  # by webhook: one that failed is left alone until the next look
    senders = {name: _Sender(hook, env, secret_of) for name, hook in config.webhooks.items()}
    for key, pending in sorted(_pending(storage, say), key=lambda one: one[1].message.at):
        taken = set(pending.taken_by)
        for place, (name, sender) in enumerate(senders.items()):
            if name in taken or name in failed:
                continue
            if pending.message.event != "test" and pending.message.event not in sender.hook.events:
                taken.add(name)
                continue
            problem = sender.send(pending.message, (until - time.monotonic()) / (len(senders) - place))
            if problem:
                failed[name] = problem
            else:
                taken.add(name)
        if taken >= senders.keys():
            storage.delete([key])
            continue
        waiting += 1
        if taken != set(pending.taken_by):
            left = pending.model_copy(update={"taken_by": tuple(sorted(taken))})
            storage.write_bytes(key, left.model_dump_json(indent=1).encode())
    for name, problem in failed.items():
        say(f"notify: webhook {name} failed: {problem}; its messages stay queued until a cycle is checked again")
    return waiting


def _pending(storage: Storage, say: Say) -> Iterator[tuple[str, Pending]]:
    for stat in storage.list(OUTBOX):
        again = f"delete {storage.uri(stat.key)}"
        try:
            found = read_record(storage, stat.key, Pending, "a message", "trnjobs", next_command=again)
        except DataError as error:
            say(f"notify: {error.seen}; next: {again}")
            continue
        if found is not None:  # else another process has sent it meanwhile
            yield stat.key, found


@dataclass
class _Sender:
    """One webhook. Its address is looked up once, and is in no text that leaves here."""

    hook: Webhook
    env: Mapping[str, str]
    secret_of: Callable[[str], str]
    _url: str = ""

    def send(self, message: Message, budget_s: float) -> str:
        """Why the message was not taken; empty when it was. Never raises; returns after `budget_s` whatever happens."""
        if budget_s <= 0:  # a message that was sent, and is not known to have been, goes out again at the next look
            return "no time was left for it"
        found: list[str] = []

        def run() -> None:
            try:
                found.append(self._send(message, budget_s))
            except TrnpipeError as error:
                found.append(error.seen)
            except Exception as error:  # its text may hold the address
                found.append(type(error).__name__)

        # A server that sends one byte now and then keeps no promise of any time-out; the thread is left to it.
        thread = threading.Thread(target=run, name="notify", daemon=True)
        thread.start()
        thread.join(budget_s)
        return found[0] if found else f"no answer within {budget_s:.0f} s"

    def _send(self, message: Message, budget_s: float) -> str:
        self._url = self._url or self._address()
        content = as_slack(message) if self.hook.form == "slack" else message.model_dump(mode="json")
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(3) | tenacity.stop_after_delay(budget_s),
            wait=_wait,
            retry=tenacity.retry_if_result(lambda answer: answer.is_worth_another),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        answer: _Answer = retrying(_post, self._url, json.dumps(content).encode(), message.id)
        return answer.problem

    def _address(self) -> str:
        """ConfigError, which does not show it, when it is none or would be sent to in clear."""
        secret, variable = self.hook.url_secret, self.hook.url_variable
        url = (self.secret_of(secret) if secret else self.env.get(variable, "")).strip()
        parts = urlsplit(url)
        if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL):
            return url
        raise ConfigError(
            f"{variable or secret} holds {'no https:// address' if url else 'nothing'}",
            expected="the address that the webhook was given",
            next_command="set it where cycles are closed: the driver, and whoever submits",
        )


@dataclass(frozen=True)
class _Answer:
    problem: str = ""
    is_worth_another: bool = False
    retry_after_s: float = 0.0


def _post(url: str, body: bytes, message_id: str) -> _Answer:
    """One request. Redirects are not followed: the address is a secret of one host."""
    headers = {"Content-Type": "application/json", "User-Agent": "trnjobs", "X-Trnjobs-Message": message_id}
    try:
        answer = urllib3.request(
            "POST",
            url,
            body=body,
            headers=headers,
            redirect=False,
            retries=False,
            timeout=urllib3.Timeout(total=ANSWER_S),
            preload_content=False,
        )
    except urllib3.exceptions.HTTPError as error:
        return _Answer(type(error).__name__, is_worth_another=True)
    answer.close()  # what it says does not matter
    if 200 <= answer.status < 300:
        return _Answer()
    after = answer.headers.get("Retry-After", "")
    return _Answer(
        f"it answered {answer.status}; expected 200 to 299",
        is_worth_another=answer.status in (408, 425, 429) or answer.status >= 500,
        retry_after_s=float(after) if after.isdecimal() else 0.0,
    )


def _wait(state: tenacity.RetryCallState) -> float:
    """As long as the server asks for, where that is short; the rest is left to the next look."""
    asked = state.outcome.result().retry_after_s if state.outcome else 0.0
    return min(max(asked, 0.2 * 2.0**state.attempt_number), MAX_RETRY_AFTER_S)
