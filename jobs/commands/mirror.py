"""`trnjobs mirror`, which copies cycles to MLflow or OpenLineage.

It only reads the workspace, and no cycle runs or waits for it. All runs have identities that are derived from the plan
of the cycle, so the command can be repeated, for example every few minutes.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jobs.cycle.cycle_store import Claim, CycleStore, claims_by_age
from jobs.cycle.job_states import Closed, outcome_of
from jobs.cycle.page.gather import PageData, gather
from jobs.plan.spec import JobPlan
from jobs.setup import open_newest
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, TransientError, first_line
from pipeline.core.optional import missing_package
from pipeline.core.progress import Say
from pipeline.core.secrets import without_secrets
from pipeline.io.storage import Storage

MLFLOW, OPENLINEAGE = "mlflow", "openlineage"
REQUEST_TIMEOUT, TOO_MANY_REQUESTS, SERVER_ERROR = 408, 429, 500


@dataclass(frozen=True)
class StoredCycle:
    """A submitted cycle, as it is stored in the workspace. `closed` is None while it is running."""

    store: CycleStore
    claim: Claim
    plan: JobPlan
    closed: Closed | None
    data: PageData

    @property
    def name(self) -> str:
        return self.store.cycle


class Mirror(Protocol):
    """A system that cycles are copied to."""

    def send(self, cycle: StoredCycle) -> str:
        """Send a cycle without adding anything twice. Return a status message."""

    def finish(self, storage: Storage) -> list[str]:
        """Complete the copy after the last cycle. Return status messages."""


def run_mirror(arguments: argparse.Namespace, say: Say) -> int:
    """Copy a cycle, or all cycles of the workspace.

    Raises ConfigError if the other side is not configured or rejects the data, TransientError if it does not answer,
    and DataError after all other cycles if one cannot be read.
    """
    newest = open_newest(arguments.settings, say)
    names = list(claims_by_age(newest.store)) if arguments.all else [newest.name]
    mirror, damaged = _mirror_class(arguments.to)(), list[DataError]()
    for name in names:
        cycle = newest.other(name).with_stored()
        try:
            claim, plan = cycle.store.claim(), cycle.store.plan() if arguments.all else cycle.plan()
            if claim is None or plan is None:
                say(f"skipping cycle {name}: it was claimed but not submitted (next: trnjobs submit --cycle {name})")
                continue
            store, records = cycle.store, cycle.store.records()
            closed = store.closed() or outcome_of(plan, records)
            data = gather(store, plan, records, cycle.settings.jobs, closed)
            stored = StoredCycle(store, claim, plan, closed, data)
        except DataError as error:  # continue with the other cycles
            say(f"skipping cycle {name}: {error.seen}")
            damaged.append(error)
            continue
        say(f"cycle {name}: {mirror.send(stored)}")
        for line in stored.data.unread:
            say(f"warning: {line}")
    for line in mirror.finish(newest.store.storage):
        say(line)
    if damaged:
        raise damaged[0]
    return EXIT_OK


def _mirror_class(name: str) -> Callable[[], Mirror]:
    try:
        if name == MLFLOW:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
            from jobs.commands.mirror_mlflow import MLflowMirror

            return MLflowMirror
        from jobs.commands.mirror_openlineage import OpenLineageMirror

        return OpenLineageMirror
    except ImportError as error:
        raise missing_package(name, f"trnjobs mirror --to {name}", error) from error


def request_error(name: str, address: str, error: Exception, status: int | None = None) -> ConfigError | TransientError:
    """Return the error for a failed request to a mirror. `name` is the value of `--to`.

    `status` is the HTTP status. By default, this is the status of the response in `error`, if any.
    """
    status = getattr(getattr(error, "response", None), "status_code", None) if status is None else status
    shown, reason = without_secrets([address, first_line(error)], ())
    command = f"trnjobs mirror --to {name}"
    if status is None or status in (REQUEST_TIMEOUT, TOO_MANY_REQUESTS) or status >= SERVER_ERROR:
        return TransientError(
            f"{shown} did not accept the data: {reason}",
            expected="a server that answers (no cycle waits for it)",
            next_command=f"{command}, which continues where it stopped",
        )
    return ConfigError(
        f"{shown} rejected a request with status {status}: {reason}",
        expected="a server that accepts these credentials and this data",
        next_command=f"correct its address or credentials in the environment, then {command}",
    )
