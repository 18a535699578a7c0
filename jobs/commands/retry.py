"""`trnjobs retry`: the jobs of a cycle that failed, and those after them, once more."""

import argparse

from jobs.commands.submit import HandOver
from jobs.cycle.records import JobState
from jobs.cycle.states import outcome_of
from jobs.setup import open_cycle, open_target_of, submitted_plan
from pipeline.core.errors import ConfigError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.proc.children import ENGINE_MARGIN_S
from pipeline.proc.signals import stop_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Submit a new round. Raises ConfigError while jobs are under way, or when none failed."""
    stop = StopSignal()
    with stop_on_signals(stop, grace_s=arguments.settings.jobs.stop_grace_s + ENGINE_MARGIN_S):
        store = open_cycle(arguments.settings, stop)
        plan = submitted_plan(store)
        target = open_target_of(arguments.settings, store, say, stop)
        records = target.records(plan)
        if (store.closed() or outcome_of(plan, records)) is None:
            raise ConfigError(
                f"cycle {store.cycle} is under way", expected="one that ended", next_command="trnjobs status"
            )
        done = {record.name for record in records if record.state is JobState.SUCCEEDED}
        again = [job.name for job in plan.jobs if job.name not in done]
        if not again:
            raise ConfigError(f"cycle {store.cycle}: no job failed", next_command="trnjobs status")
        hand_over = HandOver(arguments.settings, store, target.name, say, stop)
        return hand_over(plan, max(store.rounds(), default=0) + 1, again)
