"""`trnjobs logs JOB`: what one try of a job said on one node."""

import argparse

from jobs.cycle.records import JobRecord
from jobs.setup import open_cycle, open_target_of, submitted_plan
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("job", help="as in trnjobs status; a child of an array: embed:3")
    parser.add_argument("--attempt", type=int, default=0, help="which try, from 1 (default: the last)")
    parser.add_argument("--node", type=int, default=0, help="which node of a multi-node job, from 0 (the main one)")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Print one log. Raises ConfigError for a job, a try or an unknown node."""
    store = open_cycle(arguments.settings, StopSignal())
    plan = submitted_plan(store)
    target = open_target_of(arguments.settings, store, say, StopSignal())
    record = _find(target.records(plan), arguments.job)
    attempt = arguments.attempt or len(record.attempts)
    if not 1 <= attempt <= len(record.attempts):
        raise ConfigError(
            f"{record.name} has {len(record.attempts)} tries, none is number {arguments.attempt or 1}",
            expected="a job that has started, and one of its tries",
            next_command="trnjobs status",
        )
    for line in target.logs(record, attempt=attempt, node=arguments.node):
        say(line)
    return EXIT_OK


def _find(records: tuple[JobRecord, ...], name: str) -> JobRecord:
    every = {one.name: one for record in records for one in (record, *record.children)}
    found = every.get(name)
    if found is None or found.children:
        raise ConfigError(
            f"{name} is an array of {len(found.children)}" if found else f"no job {name!r} was submitted",
            expected=f"{name}:0 and so on" if found else f"one of {', '.join(every) or 'none'}",
            next_command="trnjobs status",
        )
    return found
