"""Commands that change a cycle: `trnjobs submit`, `retry`, `cancel` and `reconcile`."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from jobs.commands.again import begin_again, ended_line, is_run, refuse_other, script_digest, unused_settings
from jobs.commands.notify import send_messages
from jobs.config import StageJob, Step
from jobs.cycle.cycle_store import claimed_cycles, unclosed_cycles
from jobs.cycle.job_records import Closed, JobRecord, JobState
from jobs.cycle.job_states import CANCELLED, exit_code_of_cycle, outcome_of
from jobs.cycle.page.publish import report_key, write_page
from jobs.cycle.tables import cost_lines, status_lines, summary
from jobs.plan.script import RUN_PREFIX
from jobs.plan.spec import Plan
from jobs.settings import CycleSettings, of_all_jobs
from jobs.setup import OpenCycle, cycle_of, make_plan, make_run, open_cycle, open_target, stopping_jobs, submitter
from jobs.targets.batch.requests import check_plan
from jobs.targets.sagemaker.requests import check_plan as check_training_jobs
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError
from pipeline.core.interpreter import without_interpreter
from pipeline.core.progress import Say


def run_submit(arguments: argparse.Namespace, say: Say) -> int:
    """Hand the jobs of a cycle over; run again, it goes on where it stopped. `batch` alone returns before its end."""
    settings: CycleSettings = arguments.settings
    settings = settings.model_copy(update={"cycle": cycle_of(settings)})  # one day for the plan and the workspace
    with stopping_jobs(settings) as stop:
        plan, target = make_plan(settings), arguments.target or settings.jobs.target
        return submit_plan(open_cycle(settings, say, stop), plan, target, again=arguments.fresh)


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
    script, *more = without_interpreter(words) or words
    stem = more[0].rpartition(".")[2] if script == "-m" and more else Path(script).stem
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
    with stopping_jobs(settings) as stop:
        plan = make_run(settings)
        return submit_plan(
            open_cycle(settings, say, stop), plan, arguments.target or jobs.target, again=arguments.again
        )


def submit_plan(cycle: OpenCycle, plan: Plan, target_name: str, *, again: bool = False) -> int:
    """Claim, submit. Twice, or killed in between: no job is started a second time.

    `again`: from the beginning, in place of an earlier submission. Returns the exit code of the cycle where it has
    ended, 0 where its jobs are on their way. Raises ConfigError when it was submitted with other settings.
    """
    store = cycle.store
    if not again:
        refuse_other(cycle, plan, target_name)
        if (closed := store.closed()) is not None:
            cycle.say(ended_line(cycle, plan, target_name, closed))
            if closed.outcome == "succeeded":
                send_messages(cycle)
                return EXIT_OK
            return finish(cycle, plan, store.records())
    if target_name == "batch":
        check_plan(plan)
    elif target_name == "sagemaker":
        check_training_jobs(plan)
    open_target(cycle, target_name).check(plan)
    if again:
        begin_again(cycle, plan, target_name)
    claim, jobs = store.claim(), [job.name for job in plan.jobs]
    first = claim.first_round if claim else 1
    round_ = max(store.rounds(), default=first)
    if round_ > first and store.plan() == plan:  # what a retry has not handed over; the rest has succeeded
        jobs = _unfinished(plan, cycle.target().records(plan))
    return _hand_over(cycle, target_name, plan, round_, jobs)


def run_retry(arguments: argparse.Namespace, say: Say) -> int:
    """Run the jobs of a cycle that failed, and those after them, once more, as a new round; or the rest of a round
    whose submission was cut; or the rest of a cycle whose process on this machine was interrupted. With the settings
    that the cycle was submitted with, whatever is given now.

    Raises ConfigError while jobs are under way, or when none failed.
    """
    with stopping_jobs(arguments.settings) as stop:
        asked = open_cycle(arguments.settings, say, stop)
        if unused := unused_settings(asked):
            say(f"retry runs with the settings the cycle was submitted with; not used: {'; '.join(unused)}")
        cycle = asked.with_stored()
        plan, target, rounds = cycle.plan(), cycle.target(), cycle.store.rounds()
        records = target.records(plan)
        again, round_ = _unfinished(plan, records), max(rounds, default=0)
        has_ended = cycle.store.closed() or outcome_of(plan, records)
        if has_ended:
            round_ += 1
        elif cycle.interrupted_s() is not None:  # go on with the jobs of this round, which nobody runs
            cycle.say(f"cycle {cycle.name} was interrupted; going on")
            claim = cycle.store.claim()
            round_ = round_ or (claim.first_round if claim else 1)  # it may have been before its first job
        elif len(rounds) < 2 or cycle.store.submitted(round_).keys() >= {*again}:
            raise ConfigError(
                f"cycle {cycle.name} is under way",
                expected="one that ended",
                next_command=f"trnjobs status --cycle {cycle.name}",
            )
        if not again:
            raise ConfigError(f"cycle {cycle.name}: no job failed", next_command=f"trnjobs status --cycle {cycle.name}")
        if has_ended:
            cycle.store.keep_records(round_ - 1, records)
        return _hand_over(cycle, target.name, plan, round_, again)


def _unfinished(plan: Plan, records: Sequence[JobRecord]) -> list[str]:
    done = {record.name for record in records if record.state is JobState.SUCCEEDED}
    return [job.name for job in plan.jobs if job.name not in done]


def _hand_over(cycle: OpenCycle, target_name: str, plan: Plan, round_: int, jobs: Sequence[str]) -> int:
    """Claim the cycle and give `jobs` of it to the target.

    Returns the exit code of the cycle where it has ended, 0 where its jobs are on their way.
    """
    store = cycle.store
    script = script_digest(plan, target_name) if is_run(cycle) else ""
    with store.submitting(plan, target_name, submitter(), script) as renew:
        store.save_settings(of_all_jobs(cycle.settings))
        store.reopen()
        target = open_target(cycle, target_name, renew)
        if target_name == "batch":
            target.submit(plan, round_, jobs)
    if target_name != "batch":  # sees them through; a second one at it waits (local) or does nothing twice (sagemaker)
        target.submit(plan, round_, jobs)
    records = target.records(plan)
    code = finish(cycle, plan, records)
    if store.closed() is not None:
        for line in cost_lines(cycle.ledger(plan, records)):
            cycle.say(line)
    return code


def run_cancel(arguments: argparse.Namespace, say: Say) -> int:
    """End every job of a cycle that is not final, from the last to the first. What has finished stays."""
    cancel_cycle(open_cycle(arguments.settings, say).with_stored(), arguments.reason)
    return EXIT_OK


def cancel_cycle(cycle: OpenCycle, reason: str) -> None:
    """End a cycle and close it. Raises ConfigError when it has no jobs."""
    plan, target, store = cycle.plan(), cycle.target(), cycle.store
    with store.submitting(plan, target.name, submitter()):  # nobody hands over more meanwhile
        target.cancel(plan, CANCELLED + reason)
    records = target.records(plan)
    finish(cycle, plan, records, Closed(outcome="cancelled", at=store.clock(), reason=reason))


def run_reconcile(arguments: argparse.Namespace, say: Say) -> int:
    """Put on record what became of the jobs, which AWS Batch forgets after a week; close cycles that have ended.

    Without a cycle it looks at all that are under way: what a second schedule starts, so that blocked queues and
    missed deadlines are noticed by themselves.
    """
    asked = open_cycle(arguments.settings, say)
    if asked.settings.cycle:
        close_cycle(asked)
        return EXIT_OK
    names = unclosed_cycles(asked.store, claimed_cycles(asked.store, runs=True))
    under_way = [asked.other(name) for name in names]
    failed: TrnpipeError | None = None
    for cycle in under_way:
        try:
            if cycle.store.plan() is None:
                is_script = cycle.name.startswith(RUN_PREFIX)
                again = "the same trnjobs run again" if is_script else f"trnjobs submit --cycle {cycle.name}"
                say(f"cycle {cycle.name}: claimed, but nothing was submitted; next: {again}")
            else:
                close_cycle(cycle)
        except TrnpipeError as error:  # the others are looked at all the same
            say(f"cycle {cycle.name}: {type(error).__name__}: {error}")
            failed = failed or error
    if not under_way:
        say(f"no cycle is under way in {asked.store.storage.root}")
        send_messages(asked)
    if failed is not None:
        raise failed
    return EXIT_OK


def close_cycle(cycle: OpenCycle) -> None:
    """Put on record what became of the jobs of a cycle, and close it if it has ended."""
    cycle = cycle.with_stored()
    plan, target = cycle.plan(), cycle.target()
    records = target.advance(plan)
    for line in target.check_blocked(records):
        cycle.say(line)
    finish(cycle, plan, records)
    cycle.say(summary(cycle.ledger(plan, records), "under way" if cycle.interrupted_s() is None else "interrupted"))


def finish(cycle: OpenCycle, plan: Plan, records: tuple[JobRecord, ...], cancelled: Closed | None = None) -> int:
    """Record and say how the jobs stand and, when all have ended, write the page and close the cycle; its exit code.

    `cancelled`: the end of a cycle of which only a part was submitted.
    """
    cycle = cycle.with_stored()
    store, say = cycle.store, cycle.say
    records = cycle.with_errors(records)
    store.save_records(records)
    for line in (*status_lines(records), *cycle.failure_lines(records)):
        say(line)
    closed = outcome_of(plan, records, cancelled=cancelled or store.closed())
    if closed is not None:
        round_ = max(store.rounds(), default=0)
        # By the newest round: somebody may have retried the cycle since the records were read.
        is_retried = {one.id for one in store.submitted(round_).values()} - {record.id for record in records}
        closed = None if is_retried else closed.model_copy(update={"round": round_})
    if closed is None:
        standing = cycle.standing()
        look = f"; next: trnjobs status --cycle {store.cycle}" if standing == "under way" else ""
        say(f"cycle {store.cycle}: {standing}{look}")
        send_messages(cycle, plan, records)
        return EXIT_OK
    if store.closed() != closed:
        # The page first: killed in between, the cycle is still under way, and whoever closes it writes the page.
        try:
            write_page(store, plan, records, cycle.settings.jobs, closed)
        except Preempted:
            raise
        except Exception as error:  # also of a bug: the next cycle waits for the end of this one, not for its page
            say(
                f"cycle {store.cycle}: its page was not written: {type(error).__name__}: {error};"
                f" next: trnjobs report --cycle {store.cycle}"
            )
        else:
            say(f"report: {store.storage.uri(report_key(store.cycle))}")
        send_messages(cycle, plan, records, closed)
        store.close(closed)
    else:
        send_messages(cycle)
    say(f"cycle {store.cycle}: {closed.text}")
    return exit_code_of_cycle(closed, records)
