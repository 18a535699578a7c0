"""`trnjobs plan`: the jobs of a cycle, what they take and cost, before anything is sent."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.config import JobsConfig
from jobs.cycle.outlook import EMBED, VCPU, EmbedRun, embed_rate_lines, embed_rates, embed_run, expected_seconds
from jobs.cycle.records import JobRecord
from jobs.cycle.show import plan_lines
from jobs.cycle.store import CycleStore, claimed_cycles
from jobs.plan.dag import Plan
from jobs.setup import make_plan, open_cycle, prices_of
from jobs.targets.batch.limits import check_plan
from jobs.targets.batch.requests import Request, definition_request, submit_request
from pipeline.context import load_result
from pipeline.core.errors import EXIT_OK, TrnpipeError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal

HISTORY = 10  # cycles that the expected durations are the median of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="the requests as AWS Batch would get them")
    parser.add_argument("--diff", action="store_true", help="against the job definitions that are registered")
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
        from jobs.targets.batch.client import (
            BatchClient,  # boto3 takes a while to import
            connect,
        )
        from jobs.targets.batch.definitions import change_lines

        for line in change_lines(BatchClient(connect("batch")), plan):
            say(line)
    else:
        target = arguments.target or settings.jobs.target
        try:
            earlier = _earlier(open_cycle(settings, StopSignal()), target)
        except TrnpipeError as error:  # the plan itself needs no workspace
            earlier = _Earlier((), ())
            say(f"earlier cycles cannot be read: {error.seen}")
        prices = prices_of(settings)
        for line in plan_lines(plan, expected_seconds(earlier.records), prices, settings.jobs.sla_s):
            say(line)
        for line in embed_rate_lines(embed_rates(plan, earlier.embeddings, _stated(settings.jobs), prices)):
            say(line)
    return EXIT_OK


def requests_of(plan: Plan) -> list[dict[str, Request]]:
    """Both requests of every job. What only AWS can tell stands in angle brackets: revisions, ids of jobs."""
    ids = {job.name: f"<id of {job.name}>" for job in plan.jobs}
    shown = []
    for job in plan.jobs:
        definition = definition_request(plan, job)
        name = f"{definition['jobDefinitionName']}:<revision>"
        submit = submit_request(plan, job, definition=name, ids=ids)
        shown.append({"RegisterJobDefinition": definition, "SubmitJob": submit})
    return shown


@dataclass(frozen=True)
class _Earlier:
    """What earlier cycles tell; oldest first."""

    records: Sequence[tuple[JobRecord, ...]]
    embeddings: Sequence[EmbedRun]


def _earlier(store: CycleStore, target: str) -> _Earlier:
    """`target`: where the plan would run. What a machine here has embedded says nothing of one of AWS Batch."""
    names = [name for name in claimed_cycles(store.storage) if name != store.cycle][-HISTORY:]
    cycles = [CycleStore(store.storage, name, store.clock) for name in names]
    here = (one for one in cycles if (claim := one.claim()) is not None and claim.target == target)
    embeddings = (_embedding(one) for one in here)
    return _Earlier([one.records() for one in cycles], [run for run in embeddings if run is not None])


def _embedding(store: CycleStore) -> EmbedRun | None:
    plan, result = store.plan(), load_result(store.storage, store.cycle, EMBED)
    record = next((one for one in store.records() if one.name == EMBED), None)
    titles = result.figures.get("rows_embedded") if result is not None else None
    if plan is None or record is None or not isinstance(titles, int):
        return None
    return embed_run(store.cycle, plan.job(EMBED), record, titles)


def _stated(jobs: JobsConfig) -> Mapping[str, float]:
    return jobs.titles_per_s | ({} if jobs.vcpu_titles_per_s is None else {VCPU: jobs.vcpu_titles_per_s})
