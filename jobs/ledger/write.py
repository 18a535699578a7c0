"""The page of a cycle, made of what its workspace holds and put there."""

from collections.abc import Sequence

from jobs.core.config import JobsConfig
from jobs.core.cost import Prices
from jobs.core.records import Closed, JobRecord
from jobs.core.spec import CyclePlan
from jobs.ledger.page import page
from jobs.ledger.read import read_ledger
from jobs.ledger.report import CycleReport, gather, report_key
from jobs.store.cycle import CycleStore


def write_page(
    store: CycleStore, plan: CyclePlan, records: Sequence[JobRecord], config: JobsConfig, closed: Closed | None
) -> CycleReport:
    """Write reports/<cycle>.html, over an earlier one; what it shows. `closed`: the end, on record or not yet.

    Of a cycle that has ended it is the same, byte for byte, whenever and by whomever it is made.
    """
    ledger = read_ledger(
        store,
        plan,
        records,
        Prices(config.usd_per_hour, config.vcpu_usd_per_hour),
        sla_s=config.sla_s,
        schedule=config.schedule,
        closed=closed,
        without_report=True,
    )
    report = gather(store, ledger, records, reason=closed.reason if closed else "")
    store.storage.write_bytes(report_key(store.cycle), page(report).encode())
    return report
