"""Commands that change a cycle: `trnjobs submit`, `retry`, `cancel` and `reconcile`."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from jobs.commands.notify import make_messages, send_messages
from jobs.config import StageJob, Step
from jobs.cycle.ledger import read_ledger
from jobs.cycle.page.publish import report_key, write_page
from jobs.cycle.records import Closed, JobRecord, JobState
from jobs.cycle.show import cost_lines, status_lines, summary
from jobs.cycle.states import CANCELLED, exit_code_of_cycle, outcome_of
from jobs.cycle.store import CycleStore, claimed_cycles
from jobs.plan.dag import Plan
from jobs.plan.script import RUN_PREFIX, is_python
from jobs.settings import CycleSettings, of_all_jobs
from jobs.setup import make_plan, make_run, open_cycle, open_target, open_target_of, submitted_plan, submitter
from jobs.targets.batch.limits import check_plan
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.proc.children import ENGINE_MARGIN_S
from pipeline.proc.signals import stop_on_signals


def run_submit(arguments: argparse.Namespace, say: Say) -> int:
    """Hand the jobs of a cycle over; run again, it goes on where it stopped. `batch` alone returns before its end."""
    settings: CycleSettings = arguments.settings
    stop = StopSignal()
    with stop_on_signals(stop, grace_s=settings.jobs.stop_grace_s + ENGINE_MARGIN_S):
        return submit_plan(settings, make_plan(settings), arguments.target or settings.jobs.target, say, stop)


def run_run(arguments: argparse.Namespace, say: Say) -> int:
    """Hand one script over as a job, on record as the cycle run-<name>; run again, it goes on where it stopped.

    Raises ConfigError for a script that cannot be one.
    """
    settings: CycleSettings = arguments.settings
    if not arguments.command:
        raise ConfigError(
            "no script",
            expected="a command behind --",
            next_command="trnjobs run --nodes 2 -- python train.py --lr 1e-3",
        )
    jobs, words = settings.jobs, list(arguments.command)
    script = next((word for word in words if not is_python(word)), words[0])
    stem = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:-1] else Path(script).stem
    given = {name: getattr(arguments, name) for name in StageJob.model_fields if getattr(arguments, name, None)}
    try:
        name = arguments.name or re.sub(r"[^A-Za-z0-9_-]", "-", stem)
        step = Step(name=name, command=tuple(words), environment=dict(arguments.environment or ()), **given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        seen = f"{'.'.join(map(str, first['loc']))} {first['input']!r}: {first['msg']}"
        raise ConfigError(seen, next_command="trnjobs run --help") from error
    settings = settings.model_copy(
        update={"cycle": RUN_PREFIX + step.name, "jobs": jobs.model_copy(update={"steps": (step,)})}
    )
    stop = StopSignal()
    with stop_on_signals(stop, grace_s=jobs.stop_grace_s + ENGINE_MARGIN_S):
        return submit_plan(settings, make_run(settings), arguments.target or jobs.target, say, stop)


def submit_plan(settings: CycleSettings, plan: Plan, target_name: str, say: Say, stop: StopSignal) -> int:
    """Claim, submit. Twice, or killed in between: no job is started a second time.

    Returns the exit code of the cycle where it has ended, 0 where its jobs are on their way.
    """
    store = open_cycle(settings, stop)
    closed = store.closed()
    if closed is not None and store.plan() == plan:
        say(f"cycle {store.cycle} has ended; to run again what failed: trnjobs retry")
        return finish(settings, store, plan, store.records(), say)
    if target_name == "batch":
        check_plan(plan)
    elif target_name == "sagemaker":
        from jobs.targets.sagemaker import limits  # botocore takes a while to import

        limits.check_plan(plan)
    open_target(settings, store, target_name, say, stop).check(plan)
    return _hand_over(settings, store, target_name, plan, 1, [job.name for job in plan.jobs], say, stop)


def run_retry(arguments: argparse.Namespace, say: Say) -> int:
    """The jobs of a cycle that failed, and those after them, once more, as a new round.

    Raises ConfigError while jobs are under way, or when none failed.
    """
    settings, stop = arguments.settings, StopSignal()
    with stop_on_signals(stop, grace_s=settings.jobs.stop_grace_s + ENGINE_MARGIN_S):
        store = open_cycle(settings, stop)
        plan = submitted_plan(store)
        target = open_target_of(settings, store, say, stop)
        records = target.records(plan)
        if (store.closed() or outcome_of(plan, records)) is None:
            raise ConfigError(
                f"cycle {store.cycle} is under way", expected="one that ended", next_command="trnjobs status"
            )
        done = {record.name for record in records if record.state is JobState.SUCCEEDED}
        again = [job.name for job in plan.jobs if job.name not in done]
        if not again:
            raise ConfigError(f"cycle {store.cycle}: no job failed", next_command="trnjobs status")
        round_ = max(store.rounds(), default=0) + 1
        return _hand_over(settings, store, target.name, plan, round_, again, say, stop)


def _hand_over(
    settings: CycleSettings,
    store: CycleStore,
    target_name: str,
    plan: Plan,
    round_: int,
    jobs: Sequence[str],
    say: Say,
    stop: StopSignal,
) -> int:
    """Claim the cycle and give `jobs` of it to the target.

    Returns the exit code of the cycle where it has ended, 0 where its jobs are on their way.
    """
    with store.submitting(plan, target_name, submitter()) as renew:
        store.save_settings(of_all_jobs(settings))
        store.reopen()
        target = open_target(settings, store, target_name, say, stop, renew)
        if target_name == "batch":
            target.submit(plan, round_, jobs)
    if target_name != "batch":  # sees them through; a second one at it waits (local) or does nothing twice (sagemaker)
        target.submit(plan, round_, jobs)
    records = target.records(plan)
    store.save_records(records)
    code = finish(settings, store, plan, records, say)
    if store.closed() is not None:
        for line in cost_lines(read_ledger(store, plan, records, settings.jobs)):
            say(line)
    return code


def run_cancel(arguments: argparse.Namespace, say: Say) -> int:
    """End every job of a cycle that is not final, from the last to the first. What has finished stays."""
    cancel_cycle(arguments.settings, open_cycle(arguments.settings, StopSignal()), arguments.reason, say)
    return EXIT_OK


def cancel_cycle(settings: CycleSettings, store: CycleStore, reason: str, say: Say) -> None:
    """End a cycle and close it. Raises ConfigError when it has no jobs."""
    plan = submitted_plan(store)
    target = open_target_of(settings, store, say, StopSignal())
    with store.submitting(plan, target.name, submitter()):  # nobody hands over more meanwhile
        target.cancel(plan, CANCELLED + reason)
    records = target.records(plan)
    store.save_records(records)
    cancelled = Closed(outcome="cancelled", at=store.clock(), reason=reason)
    finish(settings, store, plan, records, say, cancelled)


def run_reconcile(arguments: argparse.Namespace, say: Say) -> int:
    """Put on record what became of the jobs, which AWS Batch forgets after a week; close cycles that have ended.

    Without a cycle it looks at all that are under way: what a second schedule starts, so that blocked queues and
    missed deadlines are noticed by themselves.
    """
    settings: CycleSettings = arguments.settings
    asked = open_cycle(settings, StopSignal())
    if settings.cycle:
        close_cycle(settings, asked, say)
        return EXIT_OK
    stores = [CycleStore(asked.storage, name, asked.clock) for name in claimed_cycles(asked.storage, runs=True)]
    under_way = [store for store in stores if store.closed() is None]
    failed: TrnpipeError | None = None
    for store in under_way:
        try:
            if store.plan() is None:
                say(f"cycle {store.cycle}: claimed, and nothing submitted; next: trnjobs submit --cycle {store.cycle}")
            else:
                close_cycle(settings, store, say)
        except TrnpipeError as error:  # the others are looked at all the same
            say(f"cycle {store.cycle}: {type(error).__name__}: {error}")
            failed = failed or error
    if not under_way:
        say(f"no cycle is under way in {asked.storage.root}")
        send_messages(settings.jobs.notify, asked.storage, say)
    if failed is not None:
        raise failed
    return EXIT_OK


def close_cycle(settings: CycleSettings, store: CycleStore, say: Say) -> None:
    """Put on record what became of the jobs of a cycle, and close it if it has ended."""
    plan = submitted_plan(store)
    target = open_target_of(settings, store, say, StopSignal())
    records = target.advance(plan)
    store.save_records(records)
    for line in target.check_blocked(records, dwell_s=settings.jobs.blocked_dwell_s):
        say(line)
    finish(settings, store, plan, records, say)
    say(summary(read_ledger(store, plan, records, settings.jobs)))


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
        make_messages(settings, store, plan, records, None, say)
        send_messages(settings.jobs.notify, store.storage, say)
        return EXIT_OK
    if store.closed() != closed:
        # The page first: killed in between, the cycle is still under way, and whoever closes it writes the page.
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
        make_messages(settings, store, plan, records, closed, say)
        store.close(closed)
    send_messages(settings.jobs.notify, store.storage, say)
    say(f"cycle {store.cycle}: {closed.outcome}" + (f", {closed.reason}" if closed.reason else ""))
    return exit_code_of_cycle(closed, records)
