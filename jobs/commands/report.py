"""`trnjobs report`: the page of a cycle; its last job, and for any time after. It is also written at every end."""

import argparse

from jobs.cycle.ledger import records_of
from jobs.cycle.report import report_key, write_page
from jobs.cycle.show import GOODPUT, cost_lines
from jobs.cycle.states import outcome_of
from jobs.settings import CycleSettings
from jobs.setup import open_cycle, open_target_of, submitted_plan
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command: none beside the settings."""


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Write the page (a later one replaces it) and say what it sums up. Raises ConfigError when there are no jobs."""
    settings: CycleSettings = arguments.settings
    store = open_cycle(settings, StopSignal())
    plan = submitted_plan(store)
    records = records_of(store, lambda: open_target_of(settings, store, say, StopSignal()).records(plan))
    report = write_page(store, plan, records, settings.jobs, store.closed() or outcome_of(plan, records))
    for line in (*cost_lines(report.ledger), GOODPUT, *(f"not read: {line}" for line in report.unread)):
        say(line)
    say(f"report: {store.storage.uri(report_key(store.cycle))}")
    return EXIT_OK
