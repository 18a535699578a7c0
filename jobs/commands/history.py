"""`trnjobs history`: the cycles of a workspace, newest last."""

import argparse
from datetime import UTC, datetime

from jobs.cycle.records import JobState
from jobs.cycle.store import CycleStore, claimed_cycles
from jobs.setup import open_cycle
from pipeline.core.errors import EXIT_OK
from pipeline.core.format import aligned, format_duration
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--last", type=int, default=20, help="cycles to show")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """One line a cycle, from what is on record."""
    newest = open_cycle(arguments.settings, StopSignal())
    rows: list[tuple[str, ...]] = [("cycle", "target", "submitted", "outcome", "took", "jobs done", "tries", "why")]
    for name in claimed_cycles(newest.storage)[-arguments.last :]:
        rows.append(_row(CycleStore(newest.storage, name, newest.clock)))
    for line in aligned(rows, left=(0, 1, 2, 3, 7)):
        say(line)
    return EXIT_OK


def _row(store: CycleStore) -> tuple[str, ...]:
    claim, closed, records = store.claim(), store.closed(), store.records()
    done = sum(record.state is JobState.SUCCEEDED for record in records)
    tries = sum(len(leaf.attempts) for record in records for leaf in record.leaves())
    at = claim.claimed_at if claim else None
    return (
        store.cycle,
        claim.target if claim else "-",
        "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M"),
        closed.outcome if closed else "under way",
        format_duration(closed.at - at) if closed and at is not None else "-",
        f"{done}/{len(records)}" if records else "-",
        str(tries) if records else "-",
        closed.reason if closed else "",
    )
