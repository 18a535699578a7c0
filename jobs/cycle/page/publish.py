"""Write the page of a cycle, its data and the index of all cycles: `reports/`.

<cycle>.html, <cycle>.json   of one cycle; of one that has ended the same, byte for byte, whenever and by whomever made
index.json, index.html       one line a cycle, in the order in which they were submitted
"""

from collections.abc import Sequence
from math import inf
from typing import Literal

from jobs.config import JobsConfig
from jobs.cycle.cost_ledger import read_ledger
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Closed, JobRecord
from jobs.cycle.page.data import TREND, CycleRow, PageData, gather, row_of
from jobs.cycle.page.html import index, page
from jobs.plan.dag import Plan
from jobs.plan.script import RUN_PREFIX
from pipeline.core.errors import DataError, TransientError
from pipeline.core.record import Record
from pipeline.io.storage import Storage, read_record

INDEX = "reports/index.json"
INDEX_PAGE = "reports/index.html"
MAX_CYCLES = 2000
"""Of the index; those that were submitted first go."""
_TRIES = 20


class Index(Record):
    schema_version: Literal[1] = 1
    cycles: tuple[CycleRow, ...]


def report_key(cycle: str) -> str:
    return f"reports/{cycle}.html"


def data_key(cycle: str) -> str:
    return f"reports/{cycle}.json"


def write_page(
    store: CycleStore, plan: Plan, records: Sequence[JobRecord], config: JobsConfig, closed: Closed | None
) -> PageData:
    """Write the page over an earlier one; what it shows. `closed`: the end, on record or not yet."""
    ledger = read_ledger(store, plan, records, config, closed=closed, without_report=True)
    data = gather(store, plan, ledger, records, closed)
    own = row_of(store, data, closed)
    if not store.cycle.startswith(RUN_PREFIX):  # what is no cycle is in no trend
        try:
            cycles = add_to_index(store.storage, own)
        except DataError as error:
            data = data.model_copy(update={"unread": (*data.unread, error.seen)})
        else:
            # Cycles that were submitted before this one and had ended when it did, so that its page stays as it is.
            earlier = [row for row in cycles if (row.claimed_at, row.cycle) < (own.claimed_at, own.cycle)]
            until = inf if own.closed_at is None else own.closed_at
            ended = [row for row in earlier if row.closed_at is not None and row.closed_at <= until]
            data = data.model_copy(update={"history": tuple(ended[-(TREND - 1) :])})
            store.storage.write_bytes(INDEX_PAGE, index(cycles).encode())
    store.storage.write_bytes(data_key(store.cycle), data.model_dump_json(indent=1).encode() + b"\n")
    store.storage.write_bytes(report_key(store.cycle), page(data, own).encode())
    return data


def add_to_index(storage: Storage, own: CycleRow) -> tuple[CycleRow, ...]:
    """All cycles with this one in its place, the oldest first. Raises DataError for an index that cannot be read."""
    for _ in range(_TRIES):
        stat = storage.stat(INDEX)
        known = read_index(storage)
        cycles = {row.cycle: row for row in (known.cycles if known else ())} | {own.cycle: own}
        ordered = tuple(sorted(cycles.values(), key=lambda row: (row.claimed_at, row.cycle)))[-MAX_CYCLES:]
        if known and known.cycles == ordered:
            return ordered
        text = Index(cycles=ordered).model_dump_json(indent=1).encode() + b"\n"
        if storage.write_if_match(INDEX, text, stat.etag) if stat else storage.write_if_absent(INDEX, text):
            return ordered
    raise TransientError(
        f"{storage.uri(INDEX)} changed {_TRIES} times while a line was added to it",
        next_command=f"trnjobs report --cycle {own.cycle}",
    )


def read_index(storage: Storage) -> Index | None:
    """None when there is none. Raises DataError when it cannot be read."""
    again = "delete it; trnjobs report --cycle puts each cycle into it again"
    return read_record(storage, INDEX, Index, "the index of cycles", "trnjobs report", next_command=again)
