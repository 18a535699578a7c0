"""`trnjobs fit`: would the cycle run on what Terraform is about to make? Asked by `make deploy` before it applies."""

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.schedule import ScheduleConfig, cycle_name
from jobs.settings import CycleSettings
from jobs.setup import make_plan
from jobs.targets.batch.account import account_problems, account_warnings, read_planned
from jobs.targets.batch.limits import check_plan
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.progress import Say
from pipeline.settings import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="what `terraform show -json` says of a plan")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Plan a cycle with what Terraform will say over what its settings files say; asks nobody. Raises ConfigError.

    The files are read here, at the paths that they have in the image. Files and flags of the command come on top.
    """
    planned = read_planned(arguments.plan)
    with TemporaryDirectory(prefix="trnjobs-") as folder:
        told = Path(folder) / "infra.json"  # as make deploy will write it, but for what is not known yet
        told.write_text(json.dumps(planned.settings))
        files = [*planned.files, *arguments.config, told]
        settings = resolve(files, os.environ, arguments.flags, CycleSettings).settings
    first = _next_cycle(settings.jobs.schedule)
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
    by_schedule = first or f"when EventBridge reads {settings.jobs.schedule.schedule().expression}"
    say(f"{len(plan.jobs)} jobs fit the planned queues; the first cycle by the schedule is {by_schedule}")
    return EXIT_OK


def _next_cycle(config: ScheduleConfig) -> str:
    """Of the first time to come; empty where only EventBridge knows it."""
    schedule = config.schedule()
    when = schedule.next(datetime.now(UTC))
    return "" if when is None else cycle_name(schedule, when)
