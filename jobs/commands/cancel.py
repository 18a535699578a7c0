"""`trnjobs cancel`: end what is left of a cycle."""

import argparse

from jobs.commands.submit import finish
from jobs.cycle.records import Closed
from jobs.cycle.states import CANCELLED
from jobs.setup import open_cycle, open_target_of, submitted_plan, submitter
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--reason", default="by hand", help="goes on record")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """End every job that is not final, from the last to the first. What has finished stays."""
    store = open_cycle(arguments.settings, StopSignal())
    plan = submitted_plan(store)
    target = open_target_of(arguments.settings, store, say, StopSignal())
    with store.submitting(plan, target.name, submitter()):  # nobody hands over more meanwhile
        target.cancel(plan, CANCELLED + arguments.reason)
    records = target.records(plan)
    store.save_records(records)
    cancelled = Closed(outcome="cancelled", at=store.clock(), reason=arguments.reason)
    finish(arguments.settings, store, plan, records, say, cancelled)
    return EXIT_OK
