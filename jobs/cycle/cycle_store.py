"""The jobs of a cycle as the workspace knows them: `cycles/<cycle>/jobs/`.

claim.json               whose cycle it is: the plan, the target, and who submits at this moment (a lease)
plan.json, settings.json what was submitted
submitted/round-<n>/     one file a job, written once; a round is a submission or a `trnjobs retry`
records.json             what became of the jobs (AWS Batch forgets them after a week)
records/round-<n>.json   the same of an earlier round, written once, before the next one begins
blocked.json             which jobs were seen blocked, and since when
closed.json              the outcome of the newest round; the next cycle may start
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from jobs.cycle.job_records import Closed, JobRecord, Sighting, Submission
from jobs.plan.dag import Plan
from jobs.plan.script import RUN_PREFIX
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.record import Record
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage

LEASE_S = 120.0
NUM_READ_THREADS = 16
_RECORDS = TypeAdapter(tuple[JobRecord, ...])
_SIGHTINGS = TypeAdapter(tuple[Sighting, ...])
T = TypeVar("T")


class Claim(Record):
    """Whose cycle it is. A lease that ran out may be taken over."""

    plan_id: str
    target: str
    claimed_at: float
    owner: str = Field(description="Who submits; empty when nobody does")
    lease_until: float = 0.0


@dataclass(frozen=True)
class CycleStore:
    """One cycle's jobs in a workspace. `clock`: seconds since 1970."""

    storage: Storage
    cycle: str
    clock: Callable[[], float]

    def key(self, name: str) -> str:
        return f"cycles/{self.cycle}/jobs/{name}"

    @contextmanager
    def submitting(self, plan: Plan, target: str, owner: str) -> Iterator[Callable[[], None]]:
        """Claim the cycle for a plan and be the only one who submits it; yields a function that renews the lease.

        A new claim is withdrawn when the plan is refused before any job was submitted, so that another can be claimed.
        One without plan.json counts as new: whoever made it died before it could submit anything. Raises ConfigError
        when the cycle belongs to another plan or target, TransientError while somebody else submits it (or took the
        lease over meanwhile).
        """
        is_new = self._has_no_plan()
        mine, etag = self._take(plan, target, owner)

        def renew() -> None:
            nonlocal mine, etag
            mine = mine.model_copy(update={"lease_until": self.clock() + LEASE_S})
            etag = self._replace(mine, etag)

        try:
            yield renew
        except ConfigError:
            if is_new and not self.rounds() and self._etag() == etag:
                self.storage.delete([self.key("settings.json"), self.key("plan.json")])
                self.storage.delete([self.key("claim.json")])
            raise
        finally:  # after kill -9 the lease runs out; one that somebody took over stays theirs
            free = mine.model_copy(update={"owner": "", "lease_until": 0.0})
            self.storage.write_if_match(self.key("claim.json"), free.model_dump_json(indent=1).encode(), etag)

    def claim(self) -> Claim | None:
        """None when nobody has claimed the cycle."""
        return self._read("claim.json", Claim.model_validate_json)

    def plan(self) -> Plan | None:
        """The plan that was submitted; None before. Raises DataError when it cannot be read."""
        return self._read("plan.json", Plan.model_validate_json)

    def save_settings(self, settings: Mapping[str, Any]) -> None:
        """The settings of the pipeline with which every job of the cycle runs. The first to write wins."""
        self.storage.write_if_absent(self.key("settings.json"), json.dumps(settings, indent=1).encode())

    def rounds(self) -> list[int]:
        """Submission rounds, from 1; empty before the first job was submitted."""
        folders = self.storage.list_dirs(self.key("submitted"))
        return sorted(int(name.removeprefix("round-")) for name in folders)

    def submitted(self, round_: int) -> dict[str, Submission]:
        found = {}
        for stat in self.storage.list(self.key(f"submitted/round-{round_}")):
            name = stat.key.removeprefix(self.key(""))
            if one := self._read(name, Submission.model_validate_json):
                found[one.job] = one
        return found

    def current(self) -> dict[str, Submission]:
        """Of every job its newest submission."""
        newest: dict[str, Submission] = {}
        for round_ in self.rounds():
            newest |= self.submitted(round_)
        return newest

    def save_submission(self, round_: int, submission: Submission) -> None:
        """The first to write wins. Raises TransientError when another process has made another job of it."""
        name = f"submitted/round-{round_}/{submission.job}.json"
        if self.storage.write_if_absent(self.key(name), submission.model_dump_json().encode()):
            return
        theirs = self._read(name, Submission.model_validate_json)
        if theirs is None or theirs.id != submission.id:
            raise TransientError(
                f"{self.storage.uri(self.key(name))}: another process submitted this job", next_command="trnjobs status"
            )

    def records(self) -> tuple[JobRecord, ...]:
        """What was last known of the jobs; empty before anything was."""
        return self._read("records.json", _RECORDS.validate_json) or ()

    def save_records(self, records: tuple[JobRecord, ...]) -> None:
        """What is known of the jobs now. Those of a closed cycle stay: another has seen its end meanwhile."""
        if self.closed() is None:
            self.storage.write_bytes(self.key("records.json"), _RECORDS.dump_json(records, indent=1))

    def keep_records(self, round_: int, records: Sequence[JobRecord]) -> None:
        """Before another round begins, whose records take the place of these. The first to write wins."""
        key = self.key(f"records/round-{round_}.json")
        self.storage.write_if_absent(key, _RECORDS.dump_json(tuple(records), indent=1))

    def earlier_records(self, records: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
        """Of jobs that were submitted again, in the order of rounds. `records`: the newest of each job."""
        names = [stat.key.removeprefix(self.key("")) for stat in self.storage.list(self.key("records"))]
        found = dict[str, JobRecord]()
        for name in sorted(names, key=lambda name: (len(name), name)):  # round-9 is before round-10
            found |= {one.id: one for one in self._read(name, _RECORDS.validate_json) or ()}
        newest = {one.id for one in records}
        return tuple(one for one in found.values() if one.id not in newest)

    def sightings(self) -> tuple[Sighting, ...]:
        return self._read("blocked.json", _SIGHTINGS.validate_json) or ()

    def save_sightings(self, sightings: tuple[Sighting, ...]) -> None:
        self.storage.write_bytes(self.key("blocked.json"), _SIGHTINGS.dump_json(sightings, indent=1))

    def closed(self) -> Closed | None:
        """None while the cycle is under way, also where somebody retried it while another process closed it."""
        found = self._read("closed.json", Closed.model_validate_json)
        is_earlier = found is not None and found.round is not None and found.round < max(self.rounds(), default=0)
        return None if is_earlier else found

    def close(self, closed: Closed) -> None:
        self.storage.write_bytes(self.key("closed.json"), closed.model_dump_json(indent=1).encode())

    def reopen(self) -> None:
        """A retry of jobs that failed: the cycle is under way again."""
        self.storage.delete([self.key("closed.json")])

    def _take(self, plan: Plan, target: str, owner: str) -> tuple[Claim, str]:
        """The claim of this process, and its etag."""
        now, is_other = self.clock(), False
        mine = Claim(plan_id=plan.plan_id, target=target, claimed_at=now, owner=owner, lease_until=now + LEASE_S)
        if not self.storage.write_if_absent(self.key("claim.json"), mine.model_dump_json(indent=1).encode()):
            etag, theirs = self._etag(), self.claim()
            if theirs is None:
                raise self._lost()
            is_other = (theirs.plan_id, theirs.target) != (mine.plan_id, target)
            if is_other and not self._has_no_plan():
                raise ConfigError(
                    f"cycle {self.cycle} was submitted to {theirs.target} with plan {theirs.plan_id[:12]}",
                    expected=f"that one, or a cycle nobody has submitted (this is {target}, plan {plan.plan_id[:12]})",
                    next_command=f"trnjobs status --cycle {self.cycle}; another"
                    f" {'--name' if self.cycle.startswith(RUN_PREFIX) else '--cycle'} for other settings",
                )
            if theirs.owner not in ("", owner) and theirs.lease_until > now:
                raise TransientError(
                    f"cycle {self.cycle} is being submitted by {theirs.owner}",
                    expected=f"one at a time; its lease runs out in {theirs.lease_until - now:.0f} s",
                    next_command="run the same command again then",
                )
            mine = mine.model_copy(update={"claimed_at": theirs.claimed_at})
            self._replace(mine, etag)
        write_plan = self.storage.write_bytes if is_other else self.storage.write_if_absent
        write_plan(self.key("plan.json"), plan.model_dump_json(indent=1).encode())
        etag = self._etag()
        if self.claim() != mine:  # this process was slower than its lease
            raise self._lost()
        return mine, etag

    def _has_no_plan(self) -> bool:
        """plan.json follows the claim, and the first job follows plan.json."""
        return self.storage.stat(self.key("plan.json")) is None and not self.rounds()

    def _replace(self, claim: Claim, etag: str) -> str:
        if not self.storage.write_if_match(self.key("claim.json"), claim.model_dump_json(indent=1).encode(), etag):
            raise self._lost()
        return self._etag()

    def _lost(self) -> DataError | TransientError:
        """The claim is no longer that of this process."""
        uri = self.storage.uri(self.key("claim.json"))
        if not self._etag():
            return DataError(f"{uri} is gone", next_command="trnjobs status")
        return TransientError(f"{uri}: another process took the cycle over", next_command="trnjobs status")

    def _etag(self) -> str:
        stat = self.storage.stat(self.key("claim.json"))
        return stat.etag if stat else ""

    def _read(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        key = self.key(name)
        try:
            return parse(self.storage.read_bytes(key))
        except KeyNotFound:
            return None
        except ValidationError as error:
            raise DataError(
                f"{self.storage.uri(key)} is not a valid record: {error.errors(include_url=False)[0]['msg']}",
                expected="a record written by trnjobs",
                next_command="restore an earlier version of it",
            ) from error


def claimed_cycles(store: CycleStore, *, runs: bool = False) -> list[str]:
    """Names of the cycles with jobs, in their own order; arguments as below."""
    return sorted(claims_by_age(store, runs=runs))


def claims_by_age(store: CycleStore, *, runs: bool = False) -> dict[str, Claim | None]:
    """By name the claims of the cycles in the workspace of `store`, the newest last; `runs`: also of what `trnjobs run`
    has submitted, which is no cycle.

    None, before all others: a claim that is not a valid record.
    """

    def read(name: str) -> Claim | DataError | None:
        try:
            return replace(store, cycle=name).claim()
        except DataError as error:  # one that is damaged hides no other cycle
            return error

    names = [name for name in store.storage.list_dirs("cycles") if runs or not name.startswith(RUN_PREFIX)]
    found = zip(names, _of_each(store.storage, names, read), strict=True)
    claims = {name: None if isinstance(claim, DataError) else claim for name, claim in found if claim is not None}
    return dict(sorted(claims.items(), key=lambda one: (one[1].claimed_at if one[1] else -inf, one[0])))


def unclosed_cycles(store: CycleStore, names: Sequence[str]) -> list[str]:
    """Those of these cycles, in the workspace of `store`, that nobody has closed; in their order."""
    found = _of_each(store.storage, names, lambda name: replace(store, cycle=name).closed())
    return [name for name, closed in zip(names, found, strict=True) if closed is None]


def _of_each(storage: Storage, names: Sequence[str], read: Callable[[str], T]) -> list[T]:
    return run_parallel(
        read, names, num_threads=NUM_READ_THREADS, stop=storage.stop, doing=f"looking at cycles of {storage.root}"
    )
