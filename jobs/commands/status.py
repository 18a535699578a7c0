"""`trnjobs status`: the jobs of a cycle now, wherever they run."""

import argparse
import json

from jobs.cycle.show import status_lines
from jobs.cycle.states import outcome_of
from jobs.setup import open_cycle, open_target_of, submitted_plan
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Show; nothing is changed. Raises ConfigError when the cycle has no jobs."""
    store = open_cycle(arguments.settings, StopSignal())
    plan = submitted_plan(store)
    records = open_target_of(arguments.settings, store, say, StopSignal()).records(plan)
    closed = store.closed() or outcome_of(plan, records)
    if arguments.json:
        shown = {"cycle": store.cycle, "closed": closed and closed.model_dump(mode="json")}
        say(json.dumps(shown | {"jobs": [record.model_dump(mode="json") for record in records]}, indent=1))
        return EXIT_OK
    for line in status_lines(records):
        say(line)
    state = "under way" if closed is None else closed.outcome + (f", {closed.reason}" if closed.reason else "")
    say(f"cycle {store.cycle}: {state}")
    return EXIT_OK
