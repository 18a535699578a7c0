"""`trnjobs submit`: hand the jobs of a cycle over; run again, it goes on where it stopped."""

import argparse
from dataclasses import dataclass

from jobs.cycle.ledger import read_ledger
from jobs.cycle.records import Closed, JobRecord
from jobs.cycle.report import report_key, write_page
from jobs.cycle.show import cost_lines, status_lines
from jobs.cycle.states import exit_code_of_cycle, outcome_of
from jobs.cycle.store import CycleStore
from jobs.plan.dag import Plan
from jobs.settings import CycleSettings, of_all_jobs
from jobs.setup import make_plan, open_cycle, open_target, prices_of, submitter
from jobs.targets.batch.limits import check_plan
from pipeline.core.errors import EXIT_OK, Preempted
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.proc.children import ENGINE_MARGIN_S
from pipeline.proc.signals import stop_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--target", choices=["local", "batch"], help="over jobs.target")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Submit the cycle of the settings. `local` also runs it to its end."""
    settings: CycleSettings = arguments.settings
    stop = StopSignal()
    with stop_on_signals(stop, grace_s=settings.jobs.stop_grace_s + ENGINE_MARGIN_S):
        return submit_cycle(settings, arguments.target or settings.jobs.target, say, stop)


def submit_cycle(settings: CycleSettings, target_name: str, say: Say, stop: StopSignal) -> int:
    """Plan, claim, submit. Twice, or killed in between: no job is started a second time.

    Returns the exit code of the cycle where it has ended, 0 where its jobs are on their way.
    """
    store = open_cycle(settings, stop)
    plan = make_plan(settings)
    closed = store.closed()
    if closed is not None and store.plan() == plan:
        say(f"cycle {store.cycle} has ended; to run again what failed: trnjobs retry")
        return finish(settings, store, plan, store.records(), say)
    if target_name == "batch":
        check_plan(plan)
    open_target(settings, store, target_name, say, stop).check(plan)
    hand_over = HandOver(settings, store, target_name, say, stop)
    return hand_over(plan, 1, [job.name for job in plan.jobs])


@dataclass(frozen=True)
class HandOver:
    """Claims a cycle and gives jobs of it to a target."""

    settings: CycleSettings
    store: CycleStore
    target_name: str
    say: Say
    stop: StopSignal

    def __call__(self, plan: Plan, round_: int, jobs: list[str]) -> int:
        """The exit code of the cycle where it has ended, 0 where its jobs are on their way."""
        with self.store.submitting(plan, self.target_name, submitter()) as renew:
            self.store.save_settings(of_all_jobs(self.settings))
            self.store.reopen()
            target = open_target(self.settings, self.store, self.target_name, self.say, self.stop, renew)
            if self.target_name == "batch":
                target.submit(plan, round_, jobs)
        if self.target_name == "local":  # runs them too; a lock on this machine keeps a second engine away
            target.submit(plan, round_, jobs)
        records = target.records(plan)
        self.store.save_records(records)
        code = finish(self.settings, self.store, plan, records, self.say)
        if self.store.closed() is not None:
            config = self.settings.jobs
            ledger = read_ledger(
                self.store, plan, records, prices_of(self.settings), sla_s=config.sla_s, schedule=config.schedule
            )
            for line in cost_lines(ledger):
                self.say(line)
        return code


def finish(
    settings: CycleSettings,
    store: CycleStore,
    plan: Plan,
    records: tuple[JobRecord, ...],
    say: Say,
    cancelled: Closed | None = None,
) -> int:
    """Say how the jobs stand and, when all have ended, write the page and close the cycle; its exit code.

    `cancelled`: the end of a cycle of which only a part was submitted.
    """
    for line in status_lines(records):
        say(line)
    closed = outcome_of(plan, records, cancelled=cancelled or store.closed())
    if closed is None:
        say(f"cycle {store.cycle}: under way; next: trnjobs status")
        return EXIT_OK
    if store.closed() != closed:
        # The page first: killed in between, the cycle is still under way, and whoever closes it writes the page.
        _write_page(settings, store, plan, records, closed, say)
        store.close(closed)
    say(f"cycle {store.cycle}: {closed.outcome}" + (f", {closed.reason}" if closed.reason else ""))
    return exit_code_of_cycle(closed, records)


def _write_page(
    settings: CycleSettings,
    store: CycleStore,
    plan: Plan,
    records: tuple[JobRecord, ...],
    closed: Closed,
    say: Say,
) -> None:
    try:
        write_page(store, plan, records, settings.jobs, closed)
    except Preempted:
        raise
    except Exception as error:  # also of a bug: the next cycle waits for the end of this one, not for its page
        say(
            f"cycle {store.cycle}: its page was not written: {type(error).__name__}: {error};"
            f" next: trnjobs report --cycle {store.cycle}"
        )
    else:
        say(f"report: {store.storage.uri(report_key(store.cycle))}")
