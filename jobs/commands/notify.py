"""Word to the team: `trnjobs notify`, and what every look at a cycle does for it."""

import argparse
import os
import time
from dataclasses import replace

from jobs.cycle.cost_ledger import read_ledger
from jobs.cycle.cycle_store import claims_by_age
from jobs.cycle.job_records import Closed, JobRecord
from jobs.cycle.messages import Message, deliver, messages_of, put_messages
from jobs.cycle.page.publish import report_key
from jobs.plan.dag import Plan
from jobs.setup import OpenCycle, open_cycle
from pipeline.context import load_result
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TransientError
from pipeline.core.progress import Say


def run_notify(arguments: argparse.Namespace, say: Say) -> int:
    """Send the messages that wait; `--test`: a message to every webhook first.

    Raises ConfigError without a webhook, TransientError when one did not take everything.
    """
    cycle = open_cycle(arguments.settings, say)
    settings, store = cycle.settings, cycle.store
    if not settings.jobs.notify.webhooks:
        raise ConfigError(
            "jobs.notify.webhooks is empty",
            expected="a webhook",
            next_command="a table [jobs.notify.webhooks.team] with form and url_variable in a --config file",
        )
    if arguments.test:
        at = time.time()
        test = _about(cycle, at).model_copy(
            update={"id": f"{settings.jobs.name}/{store.cycle}/test-{round(1000 * at)}", "text": "a test of trnjobs"}
        )
        put_messages(store, [test])
    if waiting := send_messages(cycle):
        raise TransientError(f"{waiting} messages are pending", next_command="trnjobs notify, once the webhook answers")
    say(f"all messages were delivered to {', '.join(settings.jobs.notify.webhooks)}")
    return EXIT_OK


def make_messages(cycle: OpenCycle, plan: Plan, records: tuple[JobRecord, ...], closed: Closed | None) -> None:
    """Put what there is to tell of a cycle into the outbox. No failure of it is one of the cycle."""
    settings, store = cycle.settings, cycle.store
    if not settings.jobs.notify.webhooks:
        return
    try:
        rounds, names = store.rounds(), list(claims_by_age(store))
        earlier = names[: names.index(store.cycle)] if store.cycle in names else []
        before = replace(store, cycle=earlier[-1]).closed() if earlier else None
        evaluated = load_result(store.storage, store.cycle, "evaluate")
        found = messages_of(
            _about(cycle, store.clock()),
            read_ledger(store, plan, records, settings.jobs, closed=closed),
            records,
            closed=closed,
            round_=(closed.round if closed else None) or max(rounds, default=1),
            promoted=bool(evaluated and evaluated.figures.get("promoted")),
            without_comparison=bool(evaluated and evaluated.figures.get("without_comparison")),
            failed_before=before is not None and before.outcome == "failed",
            retried_at=settings.jobs.notify.retried_at,
            rounds={one.id: number for number in rounds if number > 1 for one in store.submitted(number).values()},
        )
        put_messages(store, found)
    except Preempted:
        raise
    except Exception as error:  # also of a bug: a cycle ends as it ends, whoever is told
        cycle.say(f"notify: no message was queued: {type(error).__name__}: {error}")


def send_messages(cycle: OpenCycle) -> int:
    """Send what waits, of all cycles; how many messages still wait. No failure of it is one of the cycle."""
    config = cycle.settings.jobs.notify
    if not config.webhooks:
        return 0
    from jobs.targets.batch.client import secret_text  # boto3 takes a while to import

    try:
        return deliver(cycle.store.storage, config, os.environ, secret_text, cycle.say)
    except Preempted:
        raise
    except Exception as error:  # also of a bug: they wait for the next cycle to look
        cycle.say(f"notify: messages were not sent: {type(error).__name__}: {error}")
        return 1


def _about(cycle: OpenCycle, at: float) -> Message:
    settings, store = cycle.settings, cycle.store
    key, base = report_key(store.cycle), settings.jobs.notify.page_url.rstrip("/")
    return Message(
        id="",
        event="test",
        at=at,
        pipeline=settings.jobs.name,
        cycle=store.cycle,
        model=settings.model_name,
        workspace=store.storage.root,
        text="",
        page=f"{base}/{key.rpartition('/')[2]}" if base else store.storage.uri(key),
    )
