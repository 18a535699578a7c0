"""Read-only commands: `trnjobs plan`, `fit`, `status`, `logs`, `history`, `cost`, `report` and `config`."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.cycle.costs import CycleLedger, expected_seconds
from jobs.cycle.cycle_store import claims_by_age
from jobs.cycle.job_states import JobRecord, JobState, without_error
from jobs.cycle.page.publish import write_page
from jobs.cycle.tables import GOODPUT, LOCAL_COST, cost_lines, plan_lines, status_lines, total_lines
from jobs.plan.resources import prices_of
from jobs.schedule import cycle_name
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle, make_plan, open_cycle, open_newest
from jobs.targets.base import until_ended
from jobs.targets.batch.account import account_problems, account_warnings, change_lines, read_planned
from jobs.targets.batch.requests import check_plan, definition_request, submit_request
from jobs.targets.sagemaker.requests import check_plan as check_training_jobs
from jobs.targets.sagemaker.requests import sagemaker_requests
from pipeline.command_line import hint
from pipeline.context import Figure, load_result
from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError
from pipeline.core.format import aligned, format_duration
from pipeline.core.progress import Say
from pipeline.io.paths import temporary_folder
from pipeline.settings import as_json, reference, resolve, table_text

HISTORY = 10  # number of earlier cycles from which job durations are estimated


def run_plan(arguments: argparse.Namespace, say: Say) -> int:
    """Print the jobs of a cycle with their size, duration and cost.

    Raises ConfigError if the target would reject the plan.
    """
    settings: CycleSettings = arguments.settings
    target = arguments.target or settings.jobs.target
    plan = make_plan(settings)
    if target == "sagemaker":
        check_training_jobs(plan)
    elif arguments.json or arguments.diff or target == "batch":
        check_plan(plan)
    if arguments.json and target == "sagemaker":
        say(json.dumps(sagemaker_requests(plan), indent=1))
    elif arguments.json:
        # Print both requests for each job. Values assigned by AWS, such as job ids, are shown in angle brackets.
        ids = {job.name: f"<id of {job.name}>" for job in plan.jobs}
        requests = []
        for job in plan.jobs:
            definition = definition_request(plan, job)
            name = f"{definition['jobDefinitionName']}:<revision>"
            submit = submit_request(plan, job, definition=name, ids=ids)
            requests.append({"RegisterJobDefinition": definition, "SubmitJob": submit})
        say(json.dumps(requests, indent=1))
    elif arguments.diff:
        from jobs.targets.batch.client import BatchClient, connect  # imported lazily, because importing boto3 is slow

        for line in change_lines(BatchClient(connect("batch")), plan):
            say(line)
    else:
        seconds: dict[str, float] = {}
        few: Figure = None
        try:
            store = open_cycle(settings, say).store
            names = [name for name in claims_by_age(store) if name != store.cycle][-HISTORY:]
            seconds = expected_seconds(replace(store, cycle=name).records() for name in names)
            prepared = load_result(store.storage, names[-1], "prepare") if names else None
            few = prepared.figures.get("few_queries") if prepared else None
        except TrnpipeError as error:  # the plan itself does not depend on the workspace
            say(f"warning: cannot read earlier cycles: {error.seen}")
        for line in plan_lines(plan, seconds, prices_of(settings.jobs, target), settings.jobs.sla_s):
            say(line)
        if target == "local" and seconds:
            say(LOCAL_COST)
        if few:
            say(f"warning: cycle {names[-1]}: {few}")
    return EXIT_OK


def run_fit(arguments: argparse.Namespace, say: Say) -> int:
    """Check that a cycle can run on the queues that a Terraform plan would create.

    `make deploy` runs this before applying the plan. It does not access AWS. The planned settings take precedence over
    the settings files of the image, which are read from the same paths on this machine, and files and flags on the
    command line take precedence over both. Raises ConfigError if a job does not fit.
    """
    planned = read_planned(arguments.plan)
    with TemporaryDirectory(prefix="trnjobs-", dir=temporary_folder()) as folder:
        # Like the file that make deploy writes, except for values that are not known yet.
        infra = Path(folder) / "infra.json"
        infra.write_text(json.dumps(planned.settings))
        files = [*planned.files, *arguments.config, infra]
        settings = resolve(files, os.environ, arguments.flags, CycleSettings).settings
    schedule = settings.jobs.schedule.schedule()
    first = cycle_name(schedule, next(schedule.after(datetime.now(UTC))))
    plan = make_plan(settings.model_copy(update={"cycle": settings.cycle or first}))
    check_plan(plan)
    problems = list(dict.fromkeys(account_problems(plan, planned.account)))
    if problems:
        raise ConfigError(
            "\n  ".join(["a cycle with these settings cannot run on the planned queues:", *problems]),
            expected="queues and compute environments that have the capacity for every job",
            next_command="correct [jobs] or the variables of infra/, then make deploy",
        )
    for warning in account_warnings(plan, planned.account):
        say(f"warning: {warning}")
    say(f"{len(plan.jobs)} jobs fit the planned queues, the first scheduled cycle is {first}")
    return EXIT_OK


def run_config(arguments: argparse.Namespace, say: Say) -> int:
    if arguments.markdown:
        say(reference(CycleSettings))
        return EXIT_OK
    say(as_json(arguments.resolved) if arguments.json else table_text(arguments.resolved))
    return EXIT_OK


def run_status(arguments: argparse.Namespace, say: Say) -> int:
    """Print the current state of each job. Raises ConfigError if the cycle has no jobs."""
    if arguments.watch and arguments.json:
        raise ConfigError(
            "--watch and --json are both set", expected="one of them", next_command="trnjobs status --json"
        )
    cycle = open_newest(arguments.settings, (lambda _: None) if arguments.json else say).with_stored()
    store = cycle.store
    if arguments.watch:
        from jobs.commands.watch import watch  # imported lazily, because importing rich is slow

        return watch(cycle, arguments.every)
    _, records, closed = cycle.state()
    if arguments.json:
        shown = {"cycle": store.cycle, "closed": closed and closed.model_dump(mode="json")}
        say(json.dumps(shown | {"jobs": [record.model_dump(mode="json") for record in records]}, indent=1))
        return EXIT_OK
    for line in (*status_lines(records), *cycle.failure_lines(records)):
        say(line)
    ended = closed and ", ".join(filter(None, (cycle.outcome(closed), without_error(closed.reason, records))))
    say(f"cycle {store.cycle}: {ended or cycle.progress()}")
    return EXIT_OK


def run_logs(arguments: argparse.Namespace, say: Say) -> int:
    """Print the log of an attempt of a job on a node. Raises ConfigError if the job or attempt does not exist."""
    cycle = open_newest(arguments.settings, say)
    position = {"attempt": arguments.attempt, "node": arguments.node}
    lines = log_lines(cycle, arguments.job, **position, follow=arguments.follow)
    if arguments.tail:
        num_lines = sum(1 for _ in log_lines(cycle, arguments.job, **position))
        lines = islice(lines, max(0, num_lines - arguments.tail), None)
    for line in lines:
        say(line)
    return EXIT_OK


def log_lines(cycle: OpenCycle, job: str, *, attempt: int, node: int, follow: bool = False) -> Iterator[str]:
    """Yield the log lines of an attempt of a job. With `follow`, continue until the attempt has ended.

    Attempts are numbered from 1, and 0 selects the last one. Raises ConfigError if the job or attempt does not exist.
    """
    plan, target = cycle.plan(), cycle.target()

    def find() -> dict[str, JobRecord]:
        return {task.name: task for record in target.records(plan) for task in (record, *record.children)}

    tasks = find()
    record = tasks.get(job)
    if record is None or record.children:
        raise ConfigError(
            f"{job} is an array of {len(record.children)} tasks" if record else f"no job {job!r}{hint(job, tasks)}",
            expected=f"a task such as {job}:0" if record else f"one of {', '.join(tasks) or 'none'}",
            next_command="trnjobs status",
        )
    number = attempt or len(record.attempts)
    if not 1 <= number <= len(record.attempts):
        raise ConfigError(
            f"{record.name} has no attempt {attempt or 1} (attempts: {len(record.attempts)})",
            expected="the number of an attempt that has started",
            next_command="trnjobs status",
        )

    def has_ended() -> bool:
        current = find()[job]
        is_over = current.state.is_final or current.attempts[number - 1].stopped_at is not None
        return is_over or cycle.interrupted_s() is not None

    more = until_ended(has_ended, lambda: time.sleep(0.5 if target.name == "local" else 5.0))
    yield from target.logs(record, attempt=number, node=node, more=more if follow else lambda: False)


def run_history(arguments: argparse.Namespace, say: Say) -> int:
    """Print a line for each cycle of a workspace, ending with the newest. This only reads stored records."""
    base = open_newest(arguments.settings, say)
    rows: list[tuple[str, ...]] = [("cycle", "target", "submitted", "outcome", "took", "jobs done", "attempts", "why")]
    errors = list[str]()
    for name, claim in list(claims_by_age(base.store, runs=True).items())[-arguments.last :]:
        cycle = base.other(name)
        closed, records = cycle.store.closed(), cycle.store.records()
        if claim is not None:
            records = cycle.with_errors(records)
        errors += [line if line.startswith(" ") else f"cycle {name}: {line}" for line in cycle.failure_lines(records)]
        outcome, why = "under way", ""
        if closed is not None:
            outcome, why = cycle.outcome(closed), without_error(closed.reason, records)
        target, at, took = "-", "-", "-"
        if claim is None:
            why = "its claim.json is not a valid record"
        else:
            target, at = claim.target, f"{datetime.fromtimestamp(claim.claimed_at, UTC):%Y-%m-%d %H:%M}"
            took = format_duration(closed.at - claim.claimed_at) if closed else "-"
            if closed is None and cycle.interrupted_s() is not None:
                outcome = "interrupted"
                errors.append(f"cycle {name}: {cycle.progress()}")
        done, attempts = "-", "-"
        if records:
            done = f"{sum(record.state is JobState.SUCCEEDED for record in records)}/{len(records)}"
            attempts = str(sum(len(r.all_attempts()) for r in (*cycle.store.earlier_records(records), *records)))
        rows.append((name, target, at, outcome, took, done, attempts, why))
    for line in (*aligned(rows, left=(0, 1, 2, 3, 7)), *errors):
        say(line)
    return EXIT_OK


def run_cost(arguments: argparse.Namespace, say: Say) -> int:
    """Print the time and cost of a cycle, or of the newest cycles. Raises ConfigError if there are no jobs."""
    warn: Say = (lambda _: None) if arguments.json else say
    newest = open_newest(arguments.settings, warn)
    if arguments.last:
        ledgers = list(_newest_ledgers(newest, arguments.last, warn))
    else:
        plan, cycle = newest.plan(), newest.with_stored()
        ledgers = [cycle.ledger(plan, cycle.records(plan))]
    if not ledgers:
        raise ConfigError(
            f"there is no cycle with jobs in {newest.store.storage.root}",
            expected="a submitted cycle",
            next_command="trnjobs submit",
        )
    if arguments.json:
        shown = [
            ledger.model_dump(mode="json")
            | {"total": ledger.total.model_dump(mode="json"), "goodput": ledger.total.goodput}
            | {"stages": [stage.model_dump(mode="json") | {"goodput": stage.goodput} for stage in ledger.stages()]}
            for ledger in ledgers
        ]
        say(json.dumps({"cycles": shown}, indent=1))
        return EXIT_OK
    lines = cost_lines(ledgers[0]) if len(ledgers) == 1 else total_lines(ledgers)
    claims = [newest.other(ledger.cycle).store.claim() for ledger in ledgers]
    is_free = all(claim is not None and claim.target == "local" for claim in claims)
    for line in (*lines, GOODPUT, *([LOCAL_COST] if is_free else [])):
        say(line)
    return EXIT_OK


def _newest_ledgers(base: OpenCycle, last: int, warn: Say) -> Iterator[CycleLedger]:
    for name, claim in list(claims_by_age(base.store).items())[-last:]:
        cycle = base.other(name).with_stored()
        plan = cycle.store.plan() if claim else None
        if claim is None:
            warn(f"skipping cycle {name}: its claim.json is not a valid record (restore an earlier version)")
        elif plan is None:
            warn(f"skipping cycle {name}: it was claimed but not submitted (next: trnjobs submit --cycle {name})")
        else:
            yield cycle.ledger(plan, cycle.records(plan))


def run_report(arguments: argparse.Namespace, say: Say) -> int:
    """Write the page of a cycle, and print a summary of the cycle. Raises ConfigError if it has no jobs."""
    cycle = open_newest(arguments.settings, say).with_stored()
    plan, records, closed = cycle.state()
    report = write_page(cycle.store, plan, records, cycle.settings.jobs, closed)
    for line in (
        *cycle.end_lines(plan, records, closed, report),
        *(f"warning: {line}" for line in report.unread),
    ):
        say(line)
    return EXIT_OK
