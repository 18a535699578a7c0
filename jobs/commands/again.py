"""A cycle that was submitted before, submitted again: what differs, and whether it can start from the beginning."""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.cycle.job_records import Closed, JobRecord
from jobs.cycle.job_states import CANCELLED
from jobs.node.post_mortem import HIDDEN, is_secret, without_secrets
from jobs.plan.script import RUN_PREFIX, script_of
from jobs.plan.spec import Plan
from jobs.settings import differences, of_all_jobs, values_of, with_values
from jobs.setup import OpenCycle, submitter
from pipeline.checkpoint.store import CheckpointStore, prefix_of
from pipeline.core.errors import ConfigError, DataError, TrnpipeError
from pipeline.registry.records import verdict_key

MAX_CHANGES = 8
MAX_CHARACTERS = 60
"""Of one value."""
_NOT_PLANNED = tuple(
    f"jobs.{name}" for name in ("prices", "vcpu_usd", "sla_s", "schedule", "notify", "local_", "target")
)
"""Begin the names of settings that make no other plan."""


def is_run(cycle: OpenCycle) -> bool:
    return cycle.name.startswith(RUN_PREFIX)


def refuse_other(cycle: OpenCycle, plan: Plan, target: str) -> None:
    """Raise ConfigError with the settings that differ from those the cycle was submitted with; none where none do."""
    if not cycle.store.belongs_to_other(plan, target):
        return
    stops = obstacle(cycle)
    flag, other = ("--again", "--name") if is_run(cycle) else ("--fresh", "--cycle")
    begins = f"the same command with {flag}, which starts it from the beginning; or with another {other}"
    found = changes(cycle, plan, target)
    more = f"; and {len(found) - MAX_CHANGES} more" if len(found) > MAX_CHANGES else ""
    raise ConfigError(
        f"cycle {cycle.name} was submitted with other settings: {'; '.join(found[:MAX_CHANGES])}{more}",
        expected="those it was submitted with (left of each arrow), or another cycle",
        next_command=f"the same command with another {other} ({flag} is refused: {stops})" if stops else begins,
    )


def changes(cycle: OpenCycle, plan: Plan, target: str) -> list[str]:
    """Return what differs from the submission on record, as `name: stored -> given` without secrets."""
    claim, stored = cycle.store.claim(), cycle.store.plan()
    if stored is None:
        return ["its plan is not there, as another start from the beginning was interrupted"]
    found = list[tuple[str, Any, Any]]()
    if claim is not None and claim.target != target:
        found.append(("target", claim.target, target))
    if stored != plan:
        try:
            before = of_all_jobs(with_values(cycle.store.settings() or {}, {}))
        except (ConfigError, DataError):  # of another version
            before = of_all_jobs(cycle.settings)
        # The plans tell where another version, or another folder, plans equal settings differently.
        own = differences(before, of_all_jobs(cycle.settings))
        found += [one for one in own if not one[0].startswith(_NOT_PLANNED)] or list(
            differences(stored.model_dump(mode="json"), plan.model_dump(mode="json"))
        )
    return [_change(*one) for one in found]


def _change(name: str, before: Any, now: Any) -> str:
    texts = [_text(name, value) for value in (before, now)]
    cut = [text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…" for text in texts]
    return f"{name[:MAX_CHARACTERS]}: {cut[0]} -> {cut[1]}"


def _text(name: str, value: Any) -> str:
    last = name.rpartition(".")[2]
    shown = without_secrets({last: value}, ())[last]
    if isinstance(shown, list) and all(isinstance(one, str) for one in shown):
        return shlex.join(_without_secret_flags(shown)) if last == "command" else ",".join(shown)
    return shown if isinstance(shown, str) and shown and shown.isprintable() else json.dumps(shown)


def unused_settings(cycle: OpenCycle) -> list[str]:
    """Return the given settings that differ from the stored ones, for a command that runs the stored ones."""
    stored = values_of(cycle.store.settings() or {})
    given = values_of(
        cycle.settings.model_dump(mode="json", exclude_unset=True, exclude={"cycle", "workspace", "jobs"})
    )
    known = {name: value for name, value in given.items() if name in stored}
    return [_change(*one) for one in differences({name: stored[name] for name in known}, known)][:MAX_CHANGES]


def _without_secret_flags(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with the values of `--api-key` and the like hidden."""
    before = ""
    for word in words:
        name, equals, _ = word.partition("=")
        hides = before.startswith("-") and "=" not in before and is_secret(before)
        yield HIDDEN if hides else f"{name}={HIDDEN}" if equals and is_secret(name) else word
        before = word


# From the beginning: `submit --fresh`, `run --again`.


def obstacle(cycle: OpenCycle) -> str:
    """Return why the cycle cannot start from the beginning; empty when it can.

    Nothing of a cycle may have been trained or judged, so that no model and no decision of the gate is lost. A script
    may run as often as it is asked to.
    """
    store = cycle.store
    if not store.rounds():
        return ""
    if not is_run(cycle) and (done := _done(cycle)):
        return done
    if store.closed() is not None:
        return ""
    plan = store.plan()
    if plan is None:
        return ""
    try:
        target = cycle.target()
        return target.under_way(target.records(plan))
    except TrnpipeError as error:
        return f"it is not known whether its jobs have ended: {error.seen}"


def _done(cycle: OpenCycle) -> str:
    """Return what a cycle has that must stay; empty when it has nothing."""
    storage, name = cycle.store.storage, cycle.name
    closed = cycle.store.closed()
    if closed is not None and closed.outcome in ("succeeded", "refused"):
        return f"it has {'succeeded' if closed.outcome == 'succeeded' else 'ended, refused by the gate'}"
    steps = CheckpointStore(storage, name, cache_dir=Path(), emit=lambda *_, **__: None).steps()
    if steps:
        return f"it has trained: {prefix_of(name, steps[-1])}"
    for folder in storage.list_dirs(f"checkpoints/{name}/"):
        if not folder.startswith("step-"):
            return f"its script {folder} has left checkpoints/{name}/{folder}"
    for stage in ("train", "evaluate"):
        if storage.stat(f"cycles/{name}/{stage}/result.json") is not None:
            return f"its stage {stage} has finished"
    return "its model was judged" if storage.stat(verdict_key(name)) is not None else ""


def begin_again(cycle: OpenCycle, plan: Plan, target: str) -> None:
    """End what is left of the earlier submission and let this one replace it; its records and costs stay.

    Raises ConfigError with the reason when something of it must stay or still runs.
    """

    def end(earlier: Plan) -> Sequence[JobRecord]:
        if stops := obstacle(cycle):
            other = "--name" if is_run(cycle) else "--cycle"
            raise ConfigError(
                f"cycle {cycle.name} cannot start from the beginning: {stops}",
                expected="a cycle in which nothing was trained or judged, and no job runs",
                next_command=f"{cycle.command('status')}; or another {other}",
            )
        old, store = cycle.target(), cycle.store
        old.cancel(earlier, f"{CANCELLED}its cycle starts from the beginning")
        store.storage.delete([f"cycles/{store.cycle}/train/parent.json"])  # which model it was to start from
        return old.records(earlier)

    cycle.store.begin_again(plan, target, submitter(), end)


# A cycle that has ended.


def script_digest(plan: Plan, target: str) -> str:
    """Return the SHA-256 of the file that a `trnjobs run` on this machine runs; empty if there is none to look at."""
    script = Path(script_of(plan.jobs[0])) if len(plan.jobs) == 1 else Path()
    if target != "local" or not script.is_file():
        return ""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def ended_line(cycle: OpenCycle, plan: Plan, target: str, closed: Closed) -> str:
    """Return the message for a cycle that is submitted again after its end.

    Raises ConfigError for a script whose file is not the one that has run.
    """
    claim, name = cycle.store.claim(), cycle.name
    at = f"{datetime.fromtimestamp(closed.at, UTC):%Y-%m-%d %H:%M} UTC"
    digest = script_digest(plan, target) if is_run(cycle) else ""
    if digest and claim is not None and claim.script not in ("", digest):
        raise ConfigError(
            f"nothing ran: {script_of(plan.jobs[0])} is not the file that {name} ran, which ended {at}: {closed.text}",
            expected="the same file",
            next_command="the same command with --again runs it as it is now",
        )
    said = {
        "succeeded": f"cycle {name} already succeeded, {at}: nothing ran",
        "failed": f"cycle {name} failed, {at}: {closed.reason}; nothing ran",
        "refused": f"cycle {name} was refused by the gate, {at}: {closed.reason}; nothing ran, production is unchanged",
        "cancelled": f"cycle {name} was cancelled, {at}: {closed.reason}; nothing ran",
    }[closed.outcome]
    if is_run(cycle):
        compared = f"{script_of(plan.jobs[0])} is the same file (what it imports is not compared); " if digest else ""
        return f"{said}; {compared}to run it again: the same command with --again"
    if closed.outcome in ("succeeded", "refused"):
        return f"{said}; the next cycle: --cycle NAME (make: CYCLE=NAME)"
    return f"{said}; to go on with its settings: {cycle.command('retry')}"
