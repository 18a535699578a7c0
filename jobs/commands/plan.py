"""What a cycle would be, before anything is sent: `trnjobs plan` and `trnjobs fit`."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.cycle.cycle_store import CycleStore, claims_by_age
from jobs.cycle.forecast import (
    EMBED,
    VCPU,
    Amount,
    EmbedRun,
    array_lines,
    embed_rate_lines,
    embed_run,
    expected_seconds,
)
from jobs.cycle.job_records import JobRecord
from jobs.cycle.tables import plan_lines, target_cost_lines
from jobs.plan.cost import prices_of
from jobs.plan.cycle import MINE
from jobs.plan.dag import Plan
from jobs.schedule import cycle_name
from jobs.settings import CycleSettings
from jobs.setup import make_plan, open_cycle
from jobs.targets.batch.account import account_problems, account_warnings, read_planned
from jobs.targets.batch.limits import check_plan
from jobs.targets.batch.requests import definition_request, submit_request
from jobs.targets.sagemaker.requests import check_plan as check_training_jobs
from jobs.targets.sagemaker.requests import sagemaker_requests
from pipeline.context import load_result
from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.data.sources import input_rows
from pipeline.data.token_sets import SPLITS, Split
from pipeline.evaluate.split_size import figure_name, size_advice
from pipeline.io.paths import temporary_folder
from pipeline.settings import resolve

PREPARE = "prepare"
_DONE = {PREPARE: "rows_prepared", MINE: "queries", EMBED: "rows_embedded"}
"""The figure of a result that says how much a job did."""
HISTORY = 10  # cycles that the expected durations are the median of


def run_plan(arguments: argparse.Namespace, say: Say) -> int:
    """The jobs of a cycle, what they take and cost. Raises ConfigError for what AWS Batch or SageMaker would refuse."""
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
        # Both requests of every job. What only AWS can tell stands in angle brackets: revisions, ids of jobs.
        ids = {job.name: f"<id of {job.name}>" for job in plan.jobs}
        shown = []
        for job in plan.jobs:
            definition = definition_request(plan, job)
            name = f"{definition['jobDefinitionName']}:<revision>"
            submit = submit_request(plan, job, definition=name, ids=ids)
            shown.append({"RegisterJobDefinition": definition, "SubmitJob": submit})
        say(json.dumps(shown, indent=1))
    elif arguments.diff:
        from jobs.targets.batch.client import BatchClient, connect  # boto3 takes a while to import
        from jobs.targets.batch.definitions import change_lines

        for line in change_lines(BatchClient(connect("batch")), plan):
            say(line)
    else:
        records: Sequence[tuple[JobRecord, ...]] = ()
        runs: Mapping[str, Sequence[EmbedRun]] = {}
        split_lines: Sequence[str] = ()
        try:
            store = open_cycle(settings, say).store
            records, runs = _earlier(store, target)
            split_lines = _split_lines(settings, store)
        except TrnpipeError as error:  # the plan itself needs no workspace
            say(f"earlier cycles cannot be read: {error.seen}")
        prices, jobs = prices_of(settings.jobs, target), settings.jobs
        stated = jobs.titles_per_s | ({} if jobs.vcpu_titles_per_s is None else {VCPU: jobs.vcpu_titles_per_s})
        for line in plan_lines(plan, expected_seconds(records), prices, jobs.sla_s):
            say(line)
        by_target = {name: prices_of(settings.jobs, name) for name in ("local", "batch", "sagemaker")}
        for line in target_cost_lines(plan, expected_seconds(records), by_target):
            say(line)
        for line in embed_rate_lines(plan, runs.get(EMBED, ()), stated, prices):
            say(line)
        for line in (*array_lines(plan, _amounts(settings, plan, runs), runs, prices), *split_lines):
            say(line)
    return EXIT_OK


def _split_lines(settings: CycleSettings, store: CycleStore) -> list[str]:
    """A warning if the judged split of this cycle, or else of the last one prepared, is too small for the gate."""
    names = [store.cycle, *reversed([name for name in claims_by_age(store) if name != store.cycle][-HISTORY:])]
    for name in names:
        result = load_result(store.storage, name, PREPARE)
        if result is None:
            continue
        split, counts = settings.evaluate.split, dict[Split, int]()
        for one in SPLITS:
            if isinstance(number := result.figures.get(figure_name(one)), int):
                counts[one] = number
        if split in counts and counts[split] < settings.gate.min_queries:
            return [f"cycle {name}: {size_advice(split, counts[split], settings.gate.min_queries, counts)}"]
        return []
    return []


def _amounts(settings: CycleSettings, plan: Plan, runs: Mapping[str, Sequence[EmbedRun]]) -> dict[str, Amount]:
    """The work of the arrays that prepare and mine: the rows of the input where they are cheap to count, else as many
    as the cycle before had. Raises DataError for an input that is not there.
    """
    amounts: dict[str, Amount] = {}
    per_part = {PREPARE: settings.data.rows_per_chunk, MINE: settings.mine.queries_per_part}
    for job in plan.jobs:
        if job.name not in per_part or not job.array_size:
            continue
        what = "rows" if job.name == PREPARE else "queries"
        rows = input_rows(settings.data, StopSignal()) if job.name == PREPARE else None
        if rows is not None:
            amounts[job.name] = Amount(rows, per_part[job.name], "rows of the input")
        elif job.name in runs and (last := list(runs[job.name])[-1:]):
            amounts[job.name] = Amount(last[0].titles, per_part[job.name], f"{what}, as in cycle {last[0].cycle}")
    return amounts


def _earlier(store: CycleStore, target: str) -> tuple[list[tuple[JobRecord, ...]], dict[str, list[EmbedRun]]]:
    """What the cycles before tell, oldest first: the records of all, and by job how fast its work went.

    `target`: where the plan would run. What a machine here has embedded says nothing of one of AWS Batch.
    """
    claims = claims_by_age(store)
    names = [name for name in claims if name != store.cycle][-HISTORY:]
    cycles = [CycleStore(store.storage, name, store.clock) for name in names]
    records, runs = [one.records() for one in cycles], dict[str, list[EmbedRun]]()
    for one, its_records in zip(cycles, records, strict=True):
        claim = claims[one.cycle]
        if claim is None or claim.target != target:
            continue
        plan = one.plan()
        for record in its_records:
            if plan is None or record.name not in _DONE:
                continue
            result = load_result(one.storage, one.cycle, record.name)
            units = result.figures.get(_DONE[record.name]) if result is not None else None
            if isinstance(units, int) and (run := embed_run(one.cycle, plan.job(record.name), record, units)):
                runs.setdefault(record.name, []).append(run)
    return records, runs


def run_fit(arguments: argparse.Namespace, say: Say) -> int:
    """Would the cycle run on what Terraform is about to make? Asked by `make deploy` before it applies.

    Plans a cycle with what Terraform will say over what its settings files say; asks nobody. The files are read here,
    at the paths that they have in the image; files and flags of the command come on top. Raises ConfigError.
    """
    planned = read_planned(arguments.plan)
    with TemporaryDirectory(prefix="trnjobs-", dir=temporary_folder()) as folder:
        told = Path(folder) / "infra.json"  # as make deploy will write it, but for what is not known yet
        told.write_text(json.dumps(planned.settings))
        files = [*planned.files, *arguments.config, told]
        settings = resolve(files, os.environ, arguments.flags, CycleSettings).settings
    schedule = settings.jobs.schedule.schedule()
    when = schedule.next(datetime.now(UTC))
    first = "" if when is None else cycle_name(schedule, when)  # empty where only EventBridge knows it
    plan = make_plan(settings.model_copy(update={"cycle": settings.cycle or first}))
    check_plan(plan)
    problems = list(dict.fromkeys(account_problems(plan, planned.account)))
    if problems:
        raise ConfigError(
            "\n  ".join(["a cycle of these settings would not run on the planned machines:", *problems]),
            expected="queues and compute environments that can hold every job",
            next_command="correct [jobs] or the variables of infra/, then make deploy",
        )
    for warning in dict.fromkeys(account_warnings(plan, planned.account)):
        say(f"warning: {warning}")
    by_schedule = first or f"when EventBridge reads {schedule.expression}"
    say(f"{len(plan.jobs)} jobs fit the planned queues; the first cycle by the schedule is {by_schedule}")
    return EXIT_OK
