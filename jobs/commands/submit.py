"""Commands that change a cycle: `trnjobs submit`, `run`, `retry`, `cancel`, `reconcile` and `driver`.

The last section handles cycles that were submitted before. It compares the current settings with those of the earlier
submission, and determines whether the cycle can be restarted from the beginning.
"""

import argparse
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.commands.notify import send_messages
from jobs.commands.watch import View
from jobs.cycle.cycle_store import CycleStore, claimed_cycles, unclosed_cycles
from jobs.cycle.job_states import CANCELLED, Closed, JobRecord, JobState, exit_code_of_cycle, outcome_of
from jobs.cycle.page.publish import write_page
from jobs.cycle.tables import status_lines, summary, value_text
from jobs.plan.cycle import RUN_PREFIX, script_of
from jobs.plan.spec import JobPlan
from jobs.schedule import ScheduleConfig, due_cycle
from jobs.settings import CycleSettings, StageJob, Step, differences, of_all_jobs, values_of, with_values
from jobs.setup import (
    OpenCycle,
    cycle_of,
    make_plan,
    make_run,
    open_cycle,
    open_newest,
    open_target,
    stopping_jobs,
    submitter,
)
from jobs.targets.batch.requests import check_plan
from jobs.targets.sagemaker.requests import check_plan as check_training_jobs
from pipeline.checkpoint.store import CheckpointStore, prefix_of
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, Preempted, TransientError, TrnpipeError, reported_name
from pipeline.core.format import shortened
from pipeline.core.interpreter import strip_interpreter
from pipeline.core.progress import Say
from pipeline.registry.records import verdict_key

TIME_VARIABLE = "TRNJOBS_SCHEDULED_TIME"
MAX_CHANGES = 8
MAX_CHARACTERS = 60
"""Maximum length of a setting's value in messages."""
_NOT_PLANNED = tuple(
    f"jobs.{name}" for name in ("prices", "vcpu_usd", "sla_s", "schedule", "notify", "local_", "target")
)
"""Prefixes of settings that do not affect the plan."""


def run_submit(arguments: argparse.Namespace, say: Say) -> int:
    """Submit or resume a cycle. Except on AWS Batch, this blocks until the cycle has ended."""
    settings: CycleSettings = arguments.settings
    # Fix the date now, so that the plan and the workspace use the same one.
    settings = settings.model_copy(update={"cycle": cycle_of(settings)})
    with stopping_jobs() as stop:
        plan, target = make_plan(settings), arguments.target or settings.jobs.target
        return submit_plan(open_cycle(settings, say, stop, is_shown=True), plan, target, again=arguments.fresh)


def run_run(arguments: argparse.Namespace, say: Say) -> int:
    """Submit a script as the only job of the cycle run-<name>, or resume it.

    Raises ConfigError if the arguments are invalid.
    """
    settings: CycleSettings = arguments.settings
    if not arguments.command:
        raise ConfigError(
            "no script to run",
            expected="a command after --",
            next_command="trnjobs run --nodes 2 -- python train.py --lr 1e-3",
        )
    jobs, command = settings.jobs, list(arguments.command)
    script, *more = strip_interpreter(command) or command
    stem = more[0].rpartition(".")[2] if script == "-m" and more else Path(script).stem
    flags = vars(arguments).items()
    options = {name: value for name, value in flags if name in StageJob.model_fields and value is not None}
    try:
        name = arguments.name or re.sub(r"[^A-Za-z0-9_-]", "-", stem)
        step = Step(name=name, command=tuple(command), environment=dict(arguments.environment or ()), **options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))} {first['input']!r}: {first['msg']}"
        raise ConfigError(problem, next_command="trnjobs run --help") from error
    settings = settings.model_copy(
        update={"cycle": RUN_PREFIX + step.name, "jobs": jobs.model_copy(update={"steps": (step,)})}
    )
    with stopping_jobs() as stop:
        plan, target = make_run(settings), arguments.target or jobs.target
        return submit_plan(open_cycle(settings, say, stop, is_shown=True), plan, target, again=arguments.again)


def submit_plan(cycle: OpenCycle, plan: JobPlan, target_name: str, *, again: bool = False) -> int:
    """Claim the cycle and submit its jobs. This can safely be repeated, because no job is started twice.

    With `again`, the cycle is restarted from the beginning, which replaces an earlier submission. Returns the exit code
    of the cycle if it has ended, and otherwise 0. Raises ConfigError if it was submitted with different settings.
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
    submission = max(store.submissions(), default=first)
    if submission > first and store.plan() == plan:  # resume an interrupted retry
        jobs = _unfinished(plan, cycle.target().records(plan))
    return _submit_jobs(cycle, target_name, plan, submission, jobs)


def run_retry(arguments: argparse.Namespace, say: Say) -> int:
    """Submit the failed jobs of a cycle, and all jobs that depend on them, again with the stored settings.

    If the last submission is incomplete, or the cycle was interrupted on this machine, that submission is resumed
    instead. Raises ConfigError if the cycle is still running or has no failed jobs.
    """
    with stopping_jobs() as stop:
        cycle = open_newest(arguments.settings, say, stop, is_shown=True)
        if unused := unused_settings(cycle):
            say(
                f"warning: retry uses the settings of the submission and ignores {', '.join(unused)}; to use yours:"
                f" {cycle.command('submit')} --fresh"
            )
        cycle = cycle.with_stored()
        plan, target, submissions = cycle.plan(), cycle.target(), cycle.store.submissions()
        records = target.records(plan)
        unfinished, submission = _unfinished(plan, records), max(submissions, default=0)
        closed = cycle.store.closed()
        has_ended = outcome_of(plan, records, cancelled=closed)
        is_wrong = closed is not None and (has_ended is None or has_ended.outcome != closed.outcome)
        if is_wrong:  # it was closed by a watch while the last job of an interrupted retry was being submitted
            cycle.store.reopen()
        if has_ended:
            submission += 1
        elif cycle.interrupted_s() is not None:  # resume the submission, which no process is running
            cycle.say(f"cycle {cycle.name} was interrupted, resuming it")
            claim = cycle.store.claim()
            submission = submission or (claim.first_round if claim else 1)  # no job may have been submitted yet
        elif len(submissions) < 2 or cycle.store.submitted(submission).keys() >= {*unfinished}:
            raise ConfigError(
                f"cycle {cycle.name} is under way",
                expected="a cycle that has ended",
                next_command=f"trnjobs status --cycle {cycle.name}",
            )
        if not unfinished and is_wrong:
            return finish(cycle, plan, records)
        if not unfinished:
            raise ConfigError(
                f"cycle {cycle.name} has no failed jobs", next_command=f"trnjobs status --cycle {cycle.name}"
            )
        return _submit_jobs(cycle, target.name, plan, submission, unfinished, records if has_ended else ())


def _unfinished(plan: JobPlan, records: Sequence[JobRecord]) -> list[str]:
    done = {record.name for record in records if record.state is JobState.SUCCEEDED}
    return [job.name for job in plan.jobs if job.name not in done]


def _submit_jobs(
    cycle: OpenCycle,
    target_name: str,
    plan: JobPlan,
    submission: int,
    jobs: Sequence[str],
    ended: Sequence[JobRecord] = (),
) -> int:
    """Claim the cycle and submit the given jobs to the target.

    `ended` contains the final records of the submission before this one, if this is a new one. Returns the exit code of
    the cycle if it has ended, and otherwise 0. Raises ConfigError if another process has submitted jobs since then.
    """
    store, view = cycle.store, View(cycle, plan) if cycle.is_shown and target_name != "batch" else None
    with store.submitting(plan, target_name, submitter(), _script_digest(cycle, plan, target_name)) as renew:
        newest = max(store.submissions(), default=0)
        # Another process may have made or resumed a submission since the caller has read them.
        if newest > submission or (ended and _is_retried(store, newest, ended)):
            raise ConfigError(
                f"cycle {cycle.name} is under way, because another process has submitted jobs of submission {newest}",
                expected="a cycle that has ended",
                next_command=f"trnjobs status --cycle {cycle.name}",
            )
        if ended:
            store.archive_records(submission - 1, ended)
        store.save_settings(of_all_jobs(cycle.settings))
        store.reopen()
        target = open_target(replace(cycle, say=view.say) if view else cycle, target_name, renew)
        if target_name == "batch":
            target.submit(plan, submission, jobs)
    if target_name != "batch":  # blocks until the jobs have ended, even if a different process already runs them
        with view.while_running() if view else nullcontext():
            target.submit(plan, submission, jobs)
    return finish(cycle, plan, target.records(plan))


def run_cancel(arguments: argparse.Namespace, say: Say) -> int:
    """Cancel all unfinished jobs of a cycle, beginning with the last one."""
    cancel_cycle(open_newest(arguments.settings, say).with_stored(), arguments.reason)
    return EXIT_OK


def cancel_cycle(cycle: OpenCycle, reason: str) -> None:
    """Cancel a cycle and close it. Raises ConfigError if it does not exist."""
    if cycle.store.withdraw_claim(submitter()):
        cycle.say(f"cycle {cycle.name} was claimed but not submitted, so its claim was deleted")
        return
    plan, target, store = cycle.plan(), cycle.target(), cycle.store
    with store.submitting(plan, target.name, submitter()):  # prevent other processes from submitting jobs
        target.cancel(plan, CANCELLED + reason)
    records = target.records(plan)
    finish(cycle, plan, records, Closed(outcome="cancelled", at=store.clock(), reason=reason))


def run_reconcile(arguments: argparse.Namespace, say: Say) -> int:
    """Record job states, which AWS Batch only keeps for a week, and close cycles that have ended.

    Unless a cycle is specified, this includes all cycles that have not been closed. It runs on a separate schedule, so
    that blocked queues and missed deadlines are detected.
    """
    base = open_cycle(arguments.settings, say)
    if base.settings.cycle:
        close_cycle(base)
        return EXIT_OK
    names = unclosed_cycles(base.store, claimed_cycles(base.store, runs=True))
    open_cycles = [base.other(name) for name in names]
    failed: TrnpipeError | None = None
    for cycle in open_cycles:
        try:
            if cycle.store.plan() is None:
                command = "repeat trnjobs run" if is_run(cycle) else f"trnjobs submit --cycle {cycle.name}"
                say(f"cycle {cycle.name} was claimed but not submitted (next: {command})")
            else:
                close_cycle(cycle)
        except TrnpipeError as error:  # report the error and continue with the other cycles
            say(f"cycle {cycle.name}: {reported_name(error)}: {error}")
            failed = failed or error
    if not open_cycles:
        say(f"no cycle is under way in {base.store.storage.root}")
        send_messages(base)
    if failed is not None:
        raise failed
    return EXIT_OK


def close_cycle(cycle: OpenCycle) -> None:
    """Record the job states of a cycle, and close it if it has ended."""
    cycle = cycle.with_stored()
    plan, target = cycle.plan(), cycle.target()
    records = target.advance(plan)
    for line in target.check_blocked(records):
        cycle.say(line)
    finish(cycle, plan, records)
    progress = "under way" if cycle.interrupted_s() is None else "interrupted"
    cycle.say(summary(cycle.ledger(plan, records), progress, is_local=cycle.is_local))


def finish(cycle: OpenCycle, plan: JobPlan, records: tuple[JobRecord, ...], cancelled: Closed | None = None) -> int:
    """Record and print the job states. If all jobs have ended, write the page and close the cycle.

    Returns the exit code of the cycle, which is 0 while it is running. `cancelled` is used as the end of the cycle if
    some of its jobs were never submitted.
    """
    cycle = cycle.with_stored()
    store, say = cycle.store, cycle.say
    records = cycle.with_errors(records)
    store.save_records(records)
    closed = outcome_of(plan, records, cancelled=cancelled or store.closed())
    if closed is not None:
        submission = max(store.submissions(), default=0)
        # A different process may have retried the cycle after the records were read.
        closed = None if _is_retried(store, submission, records) else closed.model_copy(update={"round": submission})
    if closed is None:
        for line in (*status_lines(records), *cycle.failure_lines(records)):
            say(line)
        progress, claim = cycle.progress(), store.claim()
        if progress == "under way" and claim is not None:
            progress = f"submitted to {claim.target}, under way\n  watch it: {cycle.command('status')} --watch"
        say(f"cycle {store.cycle}: {progress}")
        send_messages(cycle, plan, records)
        return EXIT_OK
    data = None
    if store.closed() != closed:
        # Write the page first. If this process is killed before it closes the cycle, the next one writes it again.
        try:
            data = write_page(store, plan, records, cycle.settings.jobs, closed)
        except Preempted:
            raise
        except (
            Exception
        ) as error:  # even bugs must not prevent the cycle from being closed, because the next one waits for it
            say(
                f"cycle {store.cycle}: failed to write its page: {type(error).__name__}: {error}"
                f" (next: trnjobs report --cycle {store.cycle})"
            )
        send_messages(cycle, plan, records, closed)
        store.close(closed)
        if closed.round is not None and _is_retried(store, closed.round, records):
            store.reopen()
        else:  # another process may have stored older records while the page was written
            store.save_records(records, are_final=True)
    else:
        send_messages(cycle)
    for line in cycle.end_lines(plan, records, closed, data):
        say(line)
    return exit_code_of_cycle(closed, records)


def _is_retried(store: CycleStore, submission: int, records: Sequence[JobRecord]) -> bool:
    """Return whether a submission contains a job that is not among the records."""
    return not {job.id for job in store.submitted(submission).values()} <= {record.id for record in records}


# The driver, which is run by the scheduler. It starts the cycle that is due and then exits. It is idempotent.


def run_driver(arguments: argparse.Namespace, say: Say) -> int:
    """Start the cycle that is due.

    Raises ConfigError if the time does not match the schedule, and TransientError if a different cycle is running.
    """
    settings, now = arguments.settings, datetime.now(UTC)
    config = settings.jobs.schedule
    scheduled = scheduled_time(arguments.scheduled_time or os.environ.get(TIME_VARIABLE, ""), config, now)
    with stopping_jobs() as stop:
        base = open_cycle(settings, say, stop)
        return drive(config, scheduled, now, base, arguments.target or settings.jobs.target)


def drive(config: ScheduleConfig, scheduled: datetime, now: datetime, base: OpenCycle, target: str) -> int:
    """Start the cycle for a scheduled time, if it is due and no other cycle is running. Returns the exit code."""
    claimed = claimed_cycles(base.store)
    name, reason = due_cycle(config, scheduled=scheduled, now=now, claimed=claimed)
    if reason:
        base.say(f"cycle {name} is not started: {reason}")
        return EXIT_OK
    others = unclosed_cycles(base.store, [other for other in claimed if other != name])
    running = next((other for other in reversed(others) if not has_ended(base.other(other))), "")
    if running:
        raise TransientError(
            f"cycle {running} is under way, and cycle {name} would overlap with it",
            expected="only one cycle at a time",
            next_command=f"wait, or resume it (trnjobs submit --cycle {running}) or trnjobs cancel --cycle {running}",
        )
    cycle = base.other(name)
    if name in claimed and has_ended(cycle):
        cycle.say(f"cycle {name} has already ended")
        return EXIT_OK
    return submit_plan(cycle, make_plan(cycle.settings), target)


def has_ended(cycle: OpenCycle) -> bool:
    """Update the records of a cycle, and return True if it has ended."""
    if cycle.store.closed() is not None:
        return True
    cycle = cycle.with_stored()
    plan = cycle.store.plan()
    if plan is None:  # it was claimed but not submitted
        return False
    finish(cycle, plan, cycle.target().records(plan))
    return cycle.store.closed() is not None


def scheduled_time(text: str, config: ScheduleConfig, now: datetime) -> datetime:
    """Parse a scheduled time, which defaults to the most recent one. Raises ConfigError if it is invalid."""
    if not text:
        return next(config.schedule().before(now))
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ValueError(f"{text} has no UTC offset")
    except ValueError as error:
        raise ConfigError(
            f"scheduled time {text!r}: {error}",
            expected="a time such as 2026-11-20T02:00:00Z, as set by <aws.scheduler.scheduled-time>",
            next_command="correct the command in the target of the schedule",
        ) from error
    return time.astimezone(UTC)


# Handling of cycles that were submitted before.


def is_run(cycle: OpenCycle) -> bool:
    return cycle.name.startswith(RUN_PREFIX)


def refuse_other(cycle: OpenCycle, plan: JobPlan, target: str) -> None:
    """Raise ConfigError if the cycle was submitted with different settings. The error lists the differences."""
    if not cycle.store.belongs_to_other(plan, target):
        return
    stops, changed = obstacle(cycle), changes(cycle, plan, target)
    flag, other = ("--again", "--name") if is_run(cycle) else ("--fresh", "--cycle")
    restart = f"the same command with {flag} to restart it from the beginning, or with a different {other}"
    more = f" and {len(changed) - MAX_CHANGES} more" if len(changed) > MAX_CHANGES else ""
    raise ConfigError(
        f"cycle {cycle.name} was submitted with different settings: {', '.join(changed[:MAX_CHANGES])}{more}",
        expected="the settings of the submission (to the left of each arrow), or a different cycle",
        next_command=f"the same command with a different {other} ({flag} is refused: {stops})" if stops else restart,
    )


def changes(cycle: OpenCycle, plan: JobPlan, target: str) -> list[str]:
    """Return the differences from the recorded submission as `name: stored -> current`, without secrets."""
    claim, stored = cycle.store.claim(), cycle.store.plan()
    if stored is None:
        return ["its plan does not exist, because restarting it from the beginning was interrupted"]
    changed = list[tuple[str, Any, Any]]()
    if claim is not None and claim.target != target:
        changed.append(("target", claim.target, target))
    if stored != plan:
        try:
            before = of_all_jobs(with_values(cycle.store.settings() or {}, {}))
        except (ConfigError, DataError):  # settings of an incompatible version
            before = of_all_jobs(cycle.settings)
        # If the settings are the same, compare the plans, which can also depend on the version and the folder.
        own = differences(before, of_all_jobs(cycle.settings))
        changed += [difference for difference in own if not difference[0].startswith(_NOT_PLANNED)] or list(
            differences(stored.model_dump(mode="json"), plan.model_dump(mode="json"))
        )
    return [_change(*difference) for difference in changed]


def unused_settings(cycle: OpenCycle) -> list[str]:
    """Return all explicitly set settings that are ignored because they differ from the stored settings."""
    stored = values_of(cycle.store.settings() or {})
    excluded = {"cycle", "workspace", "jobs"}
    current = values_of(cycle.settings.model_dump(mode="json", exclude_unset=True, exclude=excluded))
    complete = values_of(cycle.settings.model_dump(mode="json"))  # including the defaults of records in lists
    current = {name: complete[name] for name in current if name in stored}
    different = differences({name: stored[name] for name in current}, current)
    return [_change(*difference) for difference in different][:MAX_CHANGES]


def _change(name: str, before: Any, now: Any) -> str:
    old, new = (shortened(value_text(name, value), MAX_CHARACTERS) for value in (before, now))
    return f"{name[:MAX_CHARACTERS]}: {old} -> {new}"


def obstacle(cycle: OpenCycle) -> str:
    """Return why the cycle cannot be restarted from the beginning, or an empty string if it can.

    This applies to `submit --fresh` and `run --again`. To ensure that no model and no gate decision is ever lost, a
    cycle cannot be restarted after a model was trained or evaluated. A script can always be run again.
    """
    store = cycle.store
    if not store.submissions():
        return ""
    if not is_run(cycle) and (kept := _kept_result(cycle)):
        return kept
    plan = store.plan()
    if store.closed() is not None or plan is None:
        return ""
    try:
        target = cycle.target()
        return target.busy_reason(target.records(plan))
    except TrnpipeError as error:
        return f"cannot determine if its jobs have ended: {error.seen}"


def _kept_result(cycle: OpenCycle) -> str:
    storage, name, closed = cycle.store.storage, cycle.name, cycle.store.closed()
    if closed is not None and closed.outcome in ("succeeded", "refused"):
        return "it has succeeded" if closed.outcome == "succeeded" else "its model was refused by the gate"
    if steps := CheckpointStore(storage, name, cache_dir=Path(), emit=lambda *_, **__: None).steps():
        return f"it has trained {prefix_of(name, steps[-1])}"
    for folder in storage.list_dirs(f"checkpoints/{name}/"):
        if not folder.startswith("step-"):
            return f"its script {folder} has written checkpoints/{name}/{folder}"
    for stage in ("train", "evaluate"):
        if storage.stat(f"cycles/{name}/{stage}/result.json") is not None:
            return f"its stage {stage} has finished"
    return "its model was evaluated by the gate" if storage.stat(verdict_key(name)) is not None else ""


def begin_again(cycle: OpenCycle, plan: JobPlan, target: str) -> None:
    """Cancel the jobs of an earlier submission and replace it with a new plan.

    Raises ConfigError if the earlier submission has running jobs or results that must be kept.
    """

    def end(earlier: JobPlan) -> Sequence[JobRecord]:
        if stops := obstacle(cycle):
            raise ConfigError(
                f"cycle {cycle.name} cannot be restarted from the beginning: {stops}",
                expected="a cycle without trained models, gate decisions or running jobs",
                next_command=f"{cycle.command('status')}, or a different {'--name' if is_run(cycle) else '--cycle'}",
            )
        old, store = cycle.target(), cycle.store
        old.cancel(earlier, f"{CANCELLED}its cycle is restarted from the beginning")
        store.storage.delete([f"cycles/{store.cycle}/train/parent.json"])  # the pinned parent model
        return old.records(earlier)

    cycle.store.begin_again(plan, target, submitter(), end)


def _script_digest(cycle: OpenCycle, plan: JobPlan, target: str) -> str:
    """Return the SHA-256 of the script of a local `trnjobs run`, or an empty string if it is not a file."""
    script = Path(script_of(plan.jobs[0])) if is_run(cycle) and target == "local" else Path()
    return hashlib.sha256(script.read_bytes()).hexdigest() if script.is_file() else ""


def ended_line(cycle: OpenCycle, plan: JobPlan, target: str, closed: Closed) -> str:
    """Return a message for a cycle that has already ended.

    Raises ConfigError if the cycle is a run whose script has changed since then.
    """
    claim, script, digest = cycle.store.claim(), script_of(plan.jobs[0]), _script_digest(cycle, plan, target)
    at = f"{datetime.fromtimestamp(closed.at, UTC):%Y-%m-%d %H:%M} UTC"
    if digest and claim is not None and claim.script not in ("", digest):
        raise ConfigError(
            f"nothing ran, because {script} has changed since {cycle.name} ended on {at}: {closed.text}",
            expected="an unchanged script",
            next_command="the same command with --again, to run the changed script",
        )
    outcome = {
        "succeeded": "already succeeded",
        "failed": "failed",
        "refused": "was refused by the gate, so production is unchanged",
        "cancelled": "was cancelled",
    }[closed.outcome]
    line = f"cycle {cycle.name} {outcome} on {at}, so nothing ran."
    if is_run(cycle):
        comparison = f" {script} is unchanged (not considering its imports)." if digest else ""
        return f"{line}{comparison} To run it again, use the same command with --again"
    if closed.outcome in ("succeeded", "refused"):
        return f"{line} To start a new cycle, use --cycle NAME (make: CYCLE=NAME)"
    return f"{line} To resume it with its settings, use {cycle.command('retry')}"
