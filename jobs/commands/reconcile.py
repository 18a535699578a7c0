"""`trnjobs reconcile`: put on record what became of the jobs; AWS Batch forgets them after a week."""

import argparse

from jobs.commands.submit import finish
from jobs.targets import Say, open_cycle, open_target_of, submitted_plan
from pipeline.core.errors import EXIT_OK
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Store the records of the cycle, and close it when all its jobs have ended."""
    store = open_cycle(arguments.settings, StopSignal())
    plan = submitted_plan(store)
    target = open_target_of(arguments.settings, store, say, StopSignal())
    records = target.records(plan)
    store.save_records(records)
    for line in target.check_blocked(records, dwell_s=arguments.settings.jobs.blocked_dwell_s):
        say(line)
    finish(store, plan, records, say)
    return EXIT_OK
