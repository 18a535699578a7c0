"""`trnjobs plan`: the jobs of a cycle, what they take and cost, before anything is sent."""

import argparse
import json

from jobs.core.limits import check_plan
from jobs.core.outlook import expected_seconds
from jobs.core.records import JobRecord
from jobs.core.requests import Request, definition_request, submit_request
from jobs.core.show import plan_lines
from jobs.core.spec import CyclePlan
from jobs.store.cycle import CycleStore, claimed_cycles
from jobs.targets import Say, make_plan, open_cycle, prices_of
from pipeline.core.errors import EXIT_OK, TrnpipeError
from pipeline.core.stop import StopSignal

HISTORY = 10  # cycles that the expected durations are the median of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="the requests as AWS Batch would get them")
    shown.add_argument("--diff", action="store_true", help="against the job definitions that are registered")
    parser.add_argument("--target", choices=["local", "batch"], help="over jobs.target; batch: hold against its limits")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Plan; nothing is changed anywhere. Raises ConfigError for what AWS Batch would refuse."""
    settings = arguments.settings
    plan = make_plan(settings)
    if arguments.json or arguments.diff or (arguments.target or settings.jobs.target) == "batch":
        check_plan(plan)
    if arguments.json:
        say(json.dumps(requests_of(plan), indent=1))
    elif arguments.diff:
        from jobs.batch.client import BatchClient  # boto3 takes a while to import
        from jobs.batch.connect import connect
        from jobs.batch.diff import change_lines, definition_changes

        for line in change_lines(definition_changes(BatchClient(connect("batch")), plan)):
            say(line)
    else:
        try:
            seconds = expected_seconds(_history(open_cycle(settings, StopSignal())))
        except TrnpipeError as error:  # the plan itself needs no workspace
            seconds = {}
            say(f"earlier cycles cannot be read: {error.seen}")
        for line in plan_lines(plan, seconds, prices_of(settings), settings.jobs.sla_s):
            say(line)
    return EXIT_OK


def requests_of(plan: CyclePlan) -> list[dict[str, Request]]:
    """Both requests of every job. What only AWS can tell stands in angle brackets: revisions, ids of jobs."""
    ids = {job.name: f"<id of {job.name}>" for job in plan.jobs}
    shown = []
    for job in plan.jobs:
        definition = definition_request(plan, job)
        name = f"{definition['jobDefinitionName']}:<revision>"
        submit = submit_request(plan, job, definition=name, ids=ids)
        shown.append({"RegisterJobDefinition": definition, "SubmitJob": submit})
    return shown


def _history(store: CycleStore) -> list[tuple[JobRecord, ...]]:
    names = [name for name in claimed_cycles(store.storage) if name != store.cycle][-HISTORY:]
    return [CycleStore(store.storage, name, store.clock).records() for name in names]
