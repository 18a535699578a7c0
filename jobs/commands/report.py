"""`trnjobs report`: the page of a cycle; its last job, and for any time after."""

import argparse

from jobs.ledger.page import page
from jobs.ledger.read import read_ledger, records_of
from jobs.ledger.report import gather, report_key
from jobs.ledger.show import GOODPUT, cost_lines
from jobs.settings import CycleSettings
from jobs.targets import Say, open_cycle, open_target_of, prices_of, submitted_plan
from pipeline.core.errors import EXIT_OK
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command: none beside the settings."""


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Write the page (a later one replaces it) and say what it sums up. Raises ConfigError when there are no jobs."""
    settings: CycleSettings = arguments.settings
    store = open_cycle(settings, StopSignal())
    plan = submitted_plan(store)
    records = records_of(store, lambda: open_target_of(settings, store, say, StopSignal()).records(plan))
    ledger = read_ledger(
        store,
        plan,
        records,
        prices_of(settings),
        sla_s=settings.jobs.sla_s,
        schedule=settings.jobs.schedule,
        without_report=True,
    )
    report = gather(store, ledger, records)
    store.storage.write_bytes(report_key(store.cycle), page(report).encode())
    for line in (*cost_lines(ledger), GOODPUT, *(f"not read: {line}" for line in report.unread)):
        say(line)
    say(f"report: {store.storage.uri(report_key(store.cycle))}")
    return EXIT_OK
