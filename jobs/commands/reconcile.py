"""`trnjobs reconcile`: put on record what became of the jobs; AWS Batch forgets them after a week.

Without a cycle it looks at all that are under way: what a second schedule starts, so that blocked queues and missed
deadlines are noticed by themselves.
"""

import argparse

from jobs.commands.submit import finish
from jobs.cycle.ledger import read_ledger
from jobs.cycle.show import summary
from jobs.cycle.store import CycleStore, claimed_cycles
from jobs.settings import CycleSettings
from jobs.setup import open_cycle, open_target_of, prices_of, submitted_plan
from pipeline.core.errors import EXIT_OK, TrnpipeError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Store the records of the cycle, or of all that are under way; close those of which all jobs have ended."""
    settings: CycleSettings = arguments.settings
    asked = open_cycle(settings, StopSignal())
    if settings.cycle:
        _reconcile(settings, asked, say)
        return EXIT_OK
    stores = [CycleStore(asked.storage, name, asked.clock) for name in claimed_cycles(asked.storage)]
    under_way = [store for store in stores if store.closed() is None]
    failed: TrnpipeError | None = None
    for store in under_way:
        try:
            if store.plan() is None:
                say(f"cycle {store.cycle}: claimed, and nothing submitted; next: trnjobs submit --cycle {store.cycle}")
            else:
                _reconcile(settings, store, say)
        except TrnpipeError as error:  # the others are looked at all the same
            say(f"cycle {store.cycle}: {type(error).__name__}: {error}")
            failed = failed or error
    if not under_way:
        say(f"no cycle is under way in {asked.storage.root}")
    if failed is not None:
        raise failed
    return EXIT_OK


def _reconcile(settings: CycleSettings, store: CycleStore, say: Say) -> None:
    config, plan = settings.jobs, submitted_plan(store)
    target = open_target_of(settings, store, say, StopSignal())
    records = target.records(plan)
    store.save_records(records)
    for line in target.check_blocked(records, dwell_s=config.blocked_dwell_s):
        say(line)
    finish(settings, store, plan, records, say)
    say(summary(read_ledger(store, plan, records, prices_of(settings), sla_s=config.sla_s, schedule=config.schedule)))
