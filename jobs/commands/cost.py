"""`trnjobs cost`: where the time and the money of a cycle, or of the last ones, went."""

import argparse
import json
from collections.abc import Callable

from jobs.cycle.ledger import CycleLedger, read_ledger, records_of, success_of
from jobs.cycle.show import GOODPUT, cost_lines, success_line, summary, total_lines
from jobs.cycle.store import CycleStore, claimed_cycles
from jobs.settings import CycleSettings
from jobs.setup import open_cycle, open_target_of, prices_of, submitted_plan
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--last", type=_count, metavar="N", help="the newest N cycles side by side, and their success rate"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Show; nothing is changed. Raises ConfigError when there are no jobs."""
    settings: CycleSettings = arguments.settings
    asked = open_cycle(settings, StopSignal())
    names = claimed_cycles(asked.storage)[-arguments.last :] if arguments.last else [asked.cycle]
    if not names:
        raise ConfigError(
            f"no cycle with jobs in {asked.storage.root}",
            expected="one that was submitted",
            next_command="trnjobs submit",
        )
    ledgers = [_ledger(settings, CycleStore(asked.storage, name, asked.clock), say) for name in names]
    lines = _as_json(ledgers) if arguments.json else _as_text(ledgers)
    for line in lines:
        say(line)
    return EXIT_OK


def _ledger(settings: CycleSettings, store: CycleStore, say: Callable[[str], object]) -> CycleLedger:
    plan = submitted_plan(store)
    records = records_of(store, lambda: open_target_of(settings, store, say, StopSignal()).records(plan))
    return read_ledger(
        store, plan, records, prices_of(settings), sla_s=settings.jobs.sla_s, schedule=settings.jobs.schedule
    )


def _as_text(ledgers: list[CycleLedger]) -> list[str]:
    if len(ledgers) == 1:
        return [*cost_lines(ledgers[0]), GOODPUT]
    totals = total_lines([ledger.total for ledger in ledgers])
    return [*map(summary, ledgers), *totals, success_line(success_of(ledgers)), GOODPUT]


def _as_json(ledgers: list[CycleLedger]) -> list[str]:
    shown = [
        ledger.model_dump(mode="json")
        | {"total": ledger.total.model_dump(mode="json"), "goodput": ledger.total.goodput}
        | {"stages": [stage.model_dump(mode="json") | {"goodput": stage.goodput} for stage in ledger.stages()]}
        for ledger in ledgers
    ]
    return [json.dumps({"cycles": shown, "success": success_of(ledgers).model_dump(mode="json")}, indent=1)]


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} cycles")
    return number
