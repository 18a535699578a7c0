"""Notifications through Apprise, which are sent by `trnjobs notify` and by commands that close cycles.

To ensure that no message is lost, messages are stored in the workspace until every address has accepted them:

notify/<cycle>/<name>.json          a pending message, with a list of the addresses that have accepted it
cycles/<cycle>/jobs/told/<name>     an empty marker file, which ensures that the message is only created once

The message is written first, then the marker, and then the cycle is closed. If the process is killed after a message
was delivered but before this was recorded, the message is sent again.
"""

import argparse
import logging
import os
import time
import unicodedata
from collections.abc import Sequence

from pydantic import Field

from jobs.cycle.costs import read_ledger
from jobs.cycle.job_states import Closed, JobRecord, failed_task, first_failure, without_error
from jobs.cycle.page.publish import report_key
from jobs.cycle.tables import DEADLINES, NO_LOG, logs_command, money
from jobs.plan.spec import JobPlan
from jobs.setup import OpenCycle, open_cycle
from pipeline.context import check_workspace
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, Preempted, TransientError, TrnpipeError
from pipeline.core.format import format_duration, shortened
from pipeline.core.optional import missing_package
from pipeline.core.progress import Say
from pipeline.core.record import Record
from pipeline.io.storage import read_record

OUTBOX = "notify"
MAX_TEXT = 1500
"""Maximum number of characters per line, because failure reasons can be long."""


class Notification(Record):
    """A message to the team."""

    title: str
    body: str
    at: float = Field(description="Time of the event, in seconds since 1970")
    taken_by: tuple[int, ...] = Field((), description="Indices of the addresses that have accepted the message")


def run_notify(arguments: argparse.Namespace, say: Say) -> int:
    """Send all pending messages. With `--test`, a test message is sent first.

    Raises ConfigError if no address is configured or usable, and TransientError if one did not accept all messages.
    """
    cycle = open_cycle(arguments.settings, say)
    if not cycle.settings.jobs.notify.is_set:
        raise ConfigError(
            "jobs.notify has no address",
            expected="url_variable or url_secret",
            next_command="set one of them in [jobs.notify] (see https://github.com/caronc/apprise/wiki for addresses)",
        )
    if arguments.test:
        _put(cycle, f"test-{round(1000 * time.time())}", "this is a test message")
    else:
        check_workspace(cycle.store.storage)
    if waiting := _send(cycle):
        raise TransientError(f"{waiting} messages are still pending", next_command="trnjobs notify")
    say("all messages were delivered")
    return EXIT_OK


def _put_news(cycle: OpenCycle, plan: JobPlan, records: Sequence[JobRecord], closed: Closed | None) -> None:
    """Store messages for a missed deadline and for the end of the cycle, if applicable."""
    store = cycle.store
    ledger = read_ledger(store, plan, records, cycle.settings.jobs, closed=closed)
    if ledger.deadline_at is not None and (closed.at if closed else store.clock()) > ledger.deadline_at:
        _put(cycle, "late-deadline", "the deadline has passed", at=ledger.deadline_at)
    if closed is None or closed.outcome == "cancelled":
        return
    event = cycle.outcome(closed)
    took = None if ledger.began_at is None else closed.at - ledger.began_at
    facts = (f"took {format_duration(took)}", DEADLINES[ledger.deadline], money(ledger.total, is_local=cycle.is_local))
    lines = [without_error(closed.reason, records), "; ".join(fact for fact in facts if fact)]
    first = first_failure(records)
    if first and (failed := failed_task(first)):
        lines += (failed.attempts[-1].error or NO_LOG).splitlines()
        lines.append(logs_command(failed, store.storage.root, store.cycle))
    name = f"{event.partition(' ')[0]}-{closed.round or max(store.submissions(), default=1)}"
    _put(cycle, name, event.upper() if event == "failed" else event, lines, at=closed.at)


def _put(cycle: OpenCycle, name: str, event: str, lines: Sequence[str] = (), *, at: float | None = None) -> None:
    """Store a message, unless it was created before.

    `name` identifies the message within the cycle, and `at` is the time of the event (default: now).
    """
    store, storage = cycle.store, cycle.store.storage
    if storage.stat(store.key(f"told/{name}")) is not None:
        return
    title = f"{cycle.settings.jobs.name} {store.cycle}: {event}"
    body = "\n".join(plain(line) for line in (*lines, storage.uri(report_key(store.cycle))) if line)
    message = Notification(title=plain(title), body=body, at=store.clock() if at is None else at)
    storage.write_if_absent(f"{OUTBOX}/{cycle.name}/{name}.json", message.to_json())
    storage.write_if_absent(store.key(f"told/{name}"), b"")


def plain(text: str) -> str:
    """Convert a text to a single line of at most MAX_TEXT characters, without control and format characters."""
    line = " ".join("".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in text).split())
    return shortened(line, MAX_TEXT)


def send_messages(
    cycle: OpenCycle, plan: JobPlan | None = None, records: Sequence[JobRecord] = (), closed: Closed | None = None
) -> int:
    """Send the pending messages of all cycles. If `plan` is given, messages for that cycle are stored first.

    Returns the number of messages that are still pending. Errors are only printed, so that they never affect the
    outcome of the cycle.
    """
    if not cycle.settings.jobs.notify.is_set:
        return 0
    try:
        if plan:
            _put_news(cycle, plan, records, closed)
        return _send(cycle)
    except Preempted:
        raise
    except Exception as error:  # including bugs. Don't print unknown errors, because they may contain an address.
        seen = type(error).__name__
        if isinstance(error, TrnpipeError):
            seen = f"{error.seen} (next: {error.next_command})"
        cycle.say(f"notify: messages could not be sent: {seen}")
        return 1


def _send(cycle: OpenCycle) -> int:
    """Send each pending message to all addresses that have not accepted it yet, and return how many remain pending.

    An address that fails is skipped for all further messages.
    """
    storage, pending = cycle.store.storage, list[tuple[str, Notification]]()
    for stat in storage.list(OUTBOX):
        command = f"delete {storage.uri(stat.key)}"
        try:
            message = read_record(storage, stat.key, Notification, "a message", "trnjobs", next_command=command)
        except DataError as error:
            cycle.say(f"notify: {error.seen} (next: {command})")
            continue
        if message is not None:  # otherwise, a different process has just sent it
            pending.append((stat.key, message))
    if not pending:
        return 0
    try:
        import apprise
    except ImportError as error:
        raise missing_package("apprise", "jobs.notify", error) from error
    logging.getLogger("apprise").disabled = True  # its log messages may contain an address, which is a secret
    addresses = _addresses(cycle)
    waiting, failed = 0, set[int]()
    for key, message in sorted(pending, key=lambda item: item[1].at):
        taken = set(message.taken_by)
        for index, address in enumerate(addresses):
            if index in taken or index in failed:
                continue
            sender = apprise.Apprise()
            if sender.add(address) and sender.notify(title=message.title, body=message.body, body_format="text"):
                taken.add(index)
            else:
                failed.add(index)
        if taken >= set(range(len(addresses))):
            storage.delete([key])
            continue
        waiting += 1
        if taken != set(message.taken_by):
            remaining = message.model_copy(update={"taken_by": tuple(sorted(taken))})
            storage.write_bytes(key, remaining.to_json())
    for index in sorted(failed):
        cycle.say(f"notify: address {index + 1} of jobs.notify did not accept a message, which remains pending")
    return waiting


def _addresses(cycle: OpenCycle) -> list[str]:
    config = cycle.settings.jobs.notify
    if config.url_secret:
        from jobs.targets.batch.client import secret_text  # imported lazily, because importing boto3 is slow

        text = secret_text(config.url_secret)
    else:
        text = os.environ.get(config.url_variable, "")
    if not text.split():
        raise ConfigError(
            f"{config.url_secret or config.url_variable} is empty",
            expected="Apprise URLs, separated by spaces",
            next_command="set it for all processes that close cycles, such as the driver and trnjobs submit",
        )
    return text.split()
