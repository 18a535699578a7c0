"""Puts into the records of failed jobs what their logs say went wrong.

From the post-mortem of the node that failed, which lies in the workspace whatever the target; where there is none (the
entry of the node was killed, the gate refused the model), from the end of the log itself.
"""

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from pydantic import ValidationError

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import JobRecord
from jobs.cycle.job_states import failed_leaf, with_last_attempt
from jobs.node.post_mortem import PostMortem, secrets_of, without_secrets
from jobs.targets.base import job_id_of
from pipeline.core.errors import Preempted, error_in_log
from pipeline.io.storage import KeyNotFound

TAIL_LINES = 400
MAX_NODES = 32
NOTHING = "(it printed nothing)"
Logs = Callable[[JobRecord, int, int], Iterable[str]]
"""Lines of one attempt (from 1) on one node. Raises TrnpipeError where there are none."""


def with_errors(
    store: CycleStore, records: Sequence[JobRecord], logs: Logs, env: Mapping[str, str] = os.environ
) -> tuple[JobRecord, ...]:
    """The records, with the error of the last attempt of each job that failed by itself. What cannot be read is left
    out. `env`: whose secrets must not be shown.
    """
    failed = {record.name: leaf for record in records if (leaf := failed_leaf(record)) and not leaf.attempts[-1].error}
    if not failed:
        return tuple(records)
    known = {leaf.id: leaf for record in store.records() for leaf in record.leaves()}
    found = dict[str, JobRecord]()
    for leaf in failed.values():
        last = known[leaf.id].attempts[-1:] if leaf.id in known else ()
        if last and last[0].error and len(known[leaf.id].attempts) == len(leaf.attempts):
            lines, node = [last[0].error], last[0].error_node
        else:
            lines, node = _from_post_mortem(store, leaf) or (_from_log(logs, leaf), 0)
        error = str(without_secrets("\n".join(lines), secrets_of(env)))
        found[leaf.id] = with_last_attempt(leaf, error=error, error_node=node)

    def updated(record: JobRecord) -> JobRecord:
        children = tuple(found.get(child.id, child) for child in record.children)
        return record.model_copy(update={"children": children}) if children else found.get(record.id, record)

    return tuple(map(updated, records))


def _from_post_mortem(store: CycleStore, leaf: JobRecord) -> tuple[list[str], int] | None:
    """The lines, and the number of the node: of several the one whose own command ended the job."""
    attempt = leaf.attempts[-1]
    bundles = sorted(
        _post_mortems(store, leaf),
        key=lambda one: (one.own_exit_code != attempt.exit_code, bool(one.reason and one.log), one.node),
    )
    if not bundles:
        return None
    first = bundles[0]
    lines = list(error_in_log(first.log, first.own_exit_code))
    if first.returncode is None:  # its command never ran
        lines = list(
            error_in_log([f"trnjobs-entry: {one}" if not i else one for i, one in enumerate(first.reason.splitlines())])
        )
    elif first.returncode < 0:
        name = signal.Signals(-first.returncode).name
        lines.append(f"(ended by {name}{', for want of memory' if first.out_of_memory_kills else ''})")
    return lines or [NOTHING], first.node


def _post_mortems(store: CycleStore, leaf: JobRecord) -> Iterator[PostMortem]:
    """Of the last attempt of a job, by node."""
    folder, name = store.key("post-mortem"), f"{leaf.name.replace(':', '-')}-{len(leaf.attempts)}-node"
    keys = [stat.key for stat in store.storage.list(folder) if stat.key.startswith(f"{folder}/{name}")]
    if not keys:
        return
    job, job_id = leaf.name.partition(":")[0], job_id_of(leaf)
    rounds = (one for one in reversed(store.rounds()) if (made := store.submitted(one).get(job)) and made.id == job_id)
    round_ = next(rounds, 1)
    wanted = re.compile(re.escape(name) + r"\d+" + (f"-round-{round_}" if round_ > 1 else "") + r"\.json")
    for key in [key for key in keys if wanted.fullmatch(key.rpartition("/")[2])][:MAX_NODES]:
        with suppress(KeyNotFound, ValidationError):
            yield PostMortem.model_validate_json(store.storage.read_bytes(key))


def _from_log(logs: Logs, leaf: JobRecord) -> list[str]:
    """Of the main node; empty where it cannot be read."""
    try:
        lines = deque(logs(leaf, len(leaf.attempts), 0), maxlen=TAIL_LINES)
    except Preempted:
        raise
    except Exception:  # also of a bug: the cycle ends as it ends, whatever its logs say
        return []
    return list(error_in_log(lines, leaf.attempts[-1].exit_code)) or [NOTHING]
