"""What a cycle would be, before anything is sent: `trnjobs plan` and `trnjobs fit`."""

import argparse
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.cycle.cycle_store import CycleStore, claims_by_age
from jobs.cycle.job_records import JobRecord
from jobs.cycle.ledger import expected_seconds
from jobs.cycle.tables import plan_lines
from jobs.plan.resources import prices_of
from jobs.schedule import cycle_name
from jobs.settings import CycleSettings
from jobs.setup import make_plan, open_cycle
from jobs.targets.batch.account import account_problems, account_warnings, change_lines, read_planned
from jobs.targets.batch.requests import check_plan, definition_request, submit_request
from jobs.targets.sagemaker.requests import check_plan as check_training_jobs
from jobs.targets.sagemaker.requests import sagemaker_requests
from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError
from pipeline.core.progress import Say
from pipeline.io.paths import temporary_folder
from pipeline.settings import resolve

HISTORY = 10  # cycles that the expected durations are the median of


def run_plan(arguments: argparse.Namespace, say: Say) -> int:
    """Print the jobs of a cycle, what they take and cost. Raises ConfigError for what the target would refuse."""
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

        for line in change_lines(BatchClient(connect("batch")), plan):
            say(line)
    else:
        seconds: dict[str, float] = {}
        try:
            seconds = expected_seconds(_earlier_records(open_cycle(settings, say).store))
        except TrnpipeError as error:  # the plan itself needs no workspace
            say(f"earlier cycles cannot be read: {error.seen}")
        for line in plan_lines(plan, seconds, prices_of(settings.jobs, target), settings.jobs.sla_s):
            say(line)
    return EXIT_OK


def _earlier_records(store: CycleStore) -> list[tuple[JobRecord, ...]]:
    """Return the records of the newest cycles before this one, oldest first."""
    names = [name for name in claims_by_age(store) if name != store.cycle][-HISTORY:]
    return [replace(store, cycle=name).records() for name in names]


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
    first = cycle_name(schedule, next(schedule.after(datetime.now(UTC))))
    plan = make_plan(settings.model_copy(update={"cycle": settings.cycle or first}))
    check_plan(plan)
    problems = list(dict.fromkeys(account_problems(plan, planned.account)))
    if problems:
        raise ConfigError(
            "\n  ".join(["a cycle of these settings would not run on the planned machines:", *problems]),
            expected="queues and compute environments that can hold every job",
            next_command="correct [jobs] or the variables of infra/, then make deploy",
        )
    for warning in account_warnings(plan, planned.account):
        say(f"warning: {warning}")
    say(f"{len(plan.jobs)} jobs fit the planned queues; the first cycle by the schedule is {first}")
    return EXIT_OK
