"""What a team is told of a cycle, and the two forms a webhook takes it in. Pure.

A message is made from records alone, so whoever looks at the cycle next makes the same one; its id says which it is.

Sources: Slack's pages on incoming webhooks and on formatting (three characters are escaped; <!channel>, <@U1> and links
are written with them, so an escaped text holds none).
"""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from jobs.config import NotifyEvent
from jobs.cycle.ledger import CycleLedger
from jobs.cycle.records import Closed, JobRecord
from jobs.cycle.show import DEADLINES, money
from pipeline.core.format import format_duration
from pipeline.core.record import Record

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
    failed_before: bool,
    retried_at: int,
) -> Iterator[Message]:
    """Everything there is to tell of a cycle as it stands.

    Args:
        about: what all messages of this cycle share.
        round_: of submission, from 1: a cycle that is retried ends again.
        promoted: the gate let a new model into production in this cycle.
        failed_before: the cycle before this one failed.
        retried_at: tries of a job that are worth a message.
    """

    def message(event: NotifyEvent, text: str, *, of: str = "", **more: Any) -> Message:
        name = f"{event}-{of}" if of else f"{event}-{round_}"
        line = f"{about.pipeline} {about.cycle}: {text}"
        return about.model_copy(
            update={"id": f"{about.pipeline}/{about.cycle}/{name}", "event": event, "text": plain(line), **more}
        )

    for record in records:
        for leaf in record.leaves():
            if (tries := len(leaf.tries())) >= retried_at:
                where = leaf.name.replace(":", "-")
                text = f"{leaf.name} needed {tries} tries so far"
                at = leaf.tries()[-1].started_at or about.at
                yield message("retried", text, of=f"{where}-{tries}", at=at, job=leaf.name, tries=tries)
    due, reached = ledger.deadline_at, closed.at if closed else about.at
    if due is not None and reached > due:
        yield message("late", "its deadline has passed", of="deadline", at=due)
    if closed is None:
        return
    took = None if ledger.began_at is None else closed.at - ledger.began_at
    why = plain(closed.reason)
    end: dict[str, Any] = {"at": closed.at, "took_s": took, "usd": ledger.total.usd, "reason": why}
    facts = "; ".join(
        word for word in (f"took {format_duration(took)}", DEADLINES[ledger.deadline], money(ledger.total)) if word
    )
    if closed.outcome == "failed":
        yield message("failed", f"FAILED, {why} ({facts})", **end)
    elif closed.outcome == "refused":
        yield message("refused", f"the new model was refused, production is unchanged: {why} ({facts})", **end)
    elif closed.outcome == "succeeded" and promoted:
        yield message("promoted", f"a new model is in production ({facts})", **end)
    if closed.outcome in ("succeeded", "refused") and (failed_before or round_ > 1):
        yield message("recovered", f"works again, the cycle has ended: {closed.outcome} ({facts})", **end)


def plain(text: str) -> str:
    """One line without control, format and bidirectional characters, of at most MAX_TEXT characters."""
    words = "".join(" " if unicodedata.category(one)[0] in "CZ" else one for one in text).split()
    line = " ".join(words)
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def as_json(message: Message) -> dict[str, Any]:
    return message.model_dump(mode="json")


def as_slack(message: Message) -> dict[str, Any]:
    """Of an incoming webhook: one line with a link to the page."""
    text = slack_escaped(message.text)
    if message.page.startswith(("https://", "http://")):
        text += f" <{slack_escaped(message.page).replace('|', '%7C')}|page>"
    elif message.page:
        text += f" ({slack_escaped(message.page)})"
    return {"text": text, "unfurl_links": False, "unfurl_media": False}


def slack_escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


FORMS = {"json": as_json, "slack": as_slack}
