"""Read and write the files about the jobs of a cycle, which are stored in `cycles/<cycle>/jobs/` of the workspace.

claim.json               the plan and target that own the cycle, and a lease for the process that submits it
plan.json, settings.json the plan and settings that were submitted
submitted/round-<n>/     one file per job of submission n (`trnjobs submit` or `retry`), never overwritten
records.json             the newest records of the jobs (because AWS Batch only keeps them for a week)
records/round-<n>.json   the final records of submission n, stored before the next submission and never overwritten
earlier/round-<n>/       the claim, plan and settings that `--fresh` replaced after submission n
cancel.json              which jobs were cancelled, when and why
blocked.json             which jobs are blocked, and since when
closed.json              the outcome of the newest submission (the next cycle may start once this file exists)
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter

from jobs.cycle.job_states import BlockedJob, Cancel, Closed, JobRecord, SubmittedJob
from jobs.plan.cycle import RUN_PREFIX
from jobs.plan.spec import JobPlan
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.format import natural_key
from pipeline.core.record import Record
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage, read_record, update_file

LEASE_S = 120.0
NUM_READ_THREADS = 16
_RECORDS = TypeAdapter(tuple[JobRecord, ...])
_SIGHTINGS = TypeAdapter(tuple[BlockedJob, ...])
_SETTINGS = TypeAdapter(dict[str, Any])
_CANCELS = TypeAdapter(dict[str, Cancel])
_REPLACED = ("claim.json", "plan.json", "settings.json")
T = TypeVar("T")


class Claim(Record):
    """The owner of a cycle. When the lease has expired, a different process may take it over."""

    plan_id: str
    target: str
    claimed_at: float
    owner: str = Field(description="Process that is submitting the cycle (empty: none)")
    lease_until: float = 0.0
    first_round: int = Field(1, description="First submission of this plan (earlier ones were replaced by --fresh)")
    script: str = Field("", description="SHA-256 of the script that trnjobs run submitted (empty: not known)")


class AlreadySubmitted(TransientError):
    """Raised if another process has recorded a job, which has the id `job_id` (empty: its record is gone)."""

    def __init__(self, uri: str, job_id: str) -> None:
        super().__init__(f"{uri}: another process submitted this job", next_command="trnjobs status")
        self.job_id = job_id


@dataclass(frozen=True)
class CycleStore:
    """The stored state of the jobs of one cycle. `clock` returns the seconds since 1970."""

    storage: Storage
    cycle: str
    clock: Callable[[], float]
    _submitted: dict[str, SubmittedJob] = field(default_factory=dict, repr=False, compare=False)
    """The submitted jobs that were read, by storage key. Their files are never overwritten."""

    def key(self, name: str) -> str:
        return f"cycles/{self.cycle}/jobs/{name}"

    @contextmanager
    def submitting(self, plan: JobPlan, target: str, owner: str, script: str = "") -> Iterator[Callable[[], None]]:
        """Claim the cycle for a plan and hold an exclusive lease to submit it. Yields a function that renews the lease.

        `script` is the digest of the script to run. If it is empty, the recorded digest is kept.

        If the plan turns out to be invalid before any job was submitted, a new claim is withdrawn, so that a different
        plan can be submitted. A claim without plan.json counts as new too, because the process that wrote it must have
        died before it submitted anything.

        Raises ConfigError if the cycle belongs to a different plan or target, and TransientError if another process is
        submitting it or has taken over the lease.
        """
        is_new = self._has_no_plan()
        claim, etag = self._claim_for(plan, target, owner, script)

        def renew() -> None:
            nonlocal claim, etag
            claim = claim.model_copy(update={"lease_until": self.clock() + LEASE_S})
            etag = self._replace(claim, etag)

        try:
            yield renew
        except ConfigError:
            if is_new and not self.submissions() and self._etag() == etag:
                self.storage.delete([self.key("settings.json"), self.key("plan.json")])
                if claim.first_round == 1:  # otherwise, the claim also records which submissions were replaced
                    self.storage.delete([self.key("claim.json")])
            raise
        finally:  # if the process is killed, the lease expires instead
            self._free(claim, etag)

    def withdraw_claim(self, owner: str) -> bool:
        """Delete the claim of a cycle of which nothing was submitted.

        Returns False if something was submitted, and raises TransientError if another process is submitting it.
        """
        etag, claim = self._etag(), self.claim()
        if claim is None or claim.first_round > 1 or not self._has_no_plan():
            return False
        self._check_lease(claim, owner)
        self._replace(claim.model_copy(update={"owner": owner, "lease_until": self.clock() + LEASE_S}), etag)
        self.storage.delete([self.key("claim.json")])
        return True

    def claim(self) -> Claim | None:
        """Return the claim of the cycle, or None if it is not claimed."""
        return self._read("claim.json", Claim)

    def plan(self) -> JobPlan | None:
        """Return the submitted plan, or None if there is none. Raises DataError if it cannot be read."""
        return self._read("plan.json", JobPlan)

    def save_settings(self, settings: Mapping[str, Any]) -> None:
        """Store the settings that all jobs of the cycle use, unless settings are already stored."""
        self.storage.write_if_absent(self.key("settings.json"), json.dumps(settings, indent=1).encode())

    def settings(self) -> dict[str, Any] | None:
        """Return the submitted settings as a nested dict, or None. Raises DataError if they cannot be read."""
        return self._read("settings.json", _SETTINGS)

    def submissions(self) -> list[int]:
        """Return the numbers of all submissions of the plan, starting from the `first_round` of its claim."""
        submissions, claim = self._all_submissions(), self.claim()
        return [number for number in submissions if claim is None or number >= claim.first_round]

    def _all_submissions(self) -> list[int]:
        folders = self.storage.list_dirs(self.key("submitted"))
        return sorted(int(name.removeprefix("round-")) for name in folders)

    def submitted(self, submission: int) -> dict[str, SubmittedJob]:
        """Return the jobs of a submission by name. A job that was read before is not read again."""
        jobs = dict[str, SubmittedJob]()
        for name in self._names(f"submitted/round-{submission}"):
            key = self.key(name)
            job = self._submitted.get(key) or self._read(name, SubmittedJob)
            if job is not None:
                jobs[job.job] = self._submitted[key] = job
        return jobs

    def current(self) -> dict[str, SubmittedJob]:
        """Return the most recent submission of each job, by job name."""
        return {name: job for submission in self.submissions() for name, job in self.submitted(submission).items()}

    def save_submitted(self, submission: int, submitted_job: SubmittedJob) -> None:
        """Record a submitted job. Raises AlreadySubmitted if a different process has recorded one."""
        name = f"submitted/round-{submission}/{submitted_job.job}.json"
        if self.storage.write_if_absent(self.key(name), submitted_job.model_dump_json().encode()):
            return
        existing = self._read(name, SubmittedJob)
        if existing is None or existing.id != submitted_job.id:
            raise AlreadySubmitted(self.storage.uri(self.key(name)), existing.id if existing else "")

    def records(self) -> tuple[JobRecord, ...]:
        """Return the stored records of the jobs, or an empty tuple if there are none."""
        return self._read("records.json", _RECORDS) or ()

    def save_records(self, records: tuple[JobRecord, ...], *, are_final: bool = False) -> None:
        """Store the records of the jobs, unless the cycle is closed, because these are final."""
        if are_final or self.closed() is None:
            self.storage.write_bytes(self.key("records.json"), _RECORDS.dump_json(records, indent=1))

    def archive_records(self, submission: int, records: Sequence[JobRecord]) -> None:
        """Archive the records of a submission before the next one replaces them. An existing archive is kept."""
        key = self.key(f"records/round-{submission}.json")
        self.storage.write_if_absent(key, _RECORDS.dump_json(tuple(records), indent=1))

    def earlier_records(self, records: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
        """Return archived records, in order of submission, excluding those that are among the newest `records`."""
        archived = dict[str, JobRecord]()
        for name in sorted(self._names("records"), key=natural_key):  # round-9 before round-10
            archived |= {record.id: record for record in self._read(name, _RECORDS) or ()}
        newest = {record.id for record in records}
        return tuple(record for record in archived.values() if record.id not in newest)

    def blocked_jobs(self) -> tuple[BlockedJob, ...]:
        return self._read("blocked.json", _SIGHTINGS) or ()

    def save_blocked_jobs(self, blocked_jobs: tuple[BlockedJob, ...]) -> None:
        self.storage.write_bytes(self.key("blocked.json"), _SIGHTINGS.dump_json(blocked_jobs, indent=1))

    def cancels(self) -> dict[str, Cancel]:
        """Return the recorded cancellations by job id. Raises DataError if they cannot be read."""
        return self._read("cancel.json", _CANCELS) or {}

    def save_cancels(self, cancels: Mapping[str, Cancel]) -> None:
        """Record cancellations by job id. If a job was already cancelled, its first reason is kept.

        Raises TransientError if other processes keep adding cancellations.
        """

        def added() -> bytes | None:
            existing = self.cancels()
            return None if cancels.keys() <= existing.keys() else _CANCELS.dump_json({**cancels, **existing})

        update_file(self.storage, self.key("cancel.json"), added, "run the same command again")

    def closed(self) -> Closed | None:
        """Return how the cycle ended, or None while it is running. The end of an earlier submission is ignored."""
        closed = self._read("closed.json", Closed)
        if closed is None or closed.round is None:
            return closed
        return closed if closed.round >= max(self._all_submissions(), default=0) else None

    def close(self, closed: Closed) -> None:
        self.storage.write_bytes(self.key("closed.json"), closed.to_json())

    def reopen(self) -> None:
        """Delete the recorded end of the cycle, so that a retry can continue it."""
        self.storage.delete([self.key("closed.json")])

    def belongs_to_other(self, plan: JobPlan, target: str) -> bool:
        """Return whether the cycle was submitted with a different plan or to a different target."""
        claim = self.claim()
        is_other = claim is not None and (claim.plan_id, claim.target) != (plan.plan_id, target)
        return is_other and not self._has_no_plan()

    def begin_again(
        self, plan: JobPlan, target: str, owner: str, end: Callable[[JobPlan], Sequence[JobRecord]]
    ) -> None:
        """Replace the recorded submission by a new one, and archive its plan, settings and records.

        `end` is called while the lease is held. It must end the jobs and return their final records, or raise an error
        to abort. The claim is replaced by a single write at the end, so if this process is killed before, the old
        submission remains on record. Does nothing if there is no submission to replace.
        """
        etag, old, submissions = self._etag(), self.claim(), self.submissions()
        if old is None or not (submissions or self.belongs_to_other(plan, target)):
            return
        self._check_lease(old, owner)

        def renew() -> None:
            nonlocal etag
            etag = self._replace(old.model_copy(update={"owner": owner, "lease_until": self.clock() + LEASE_S}), etag)

        renew()
        try:
            if submissions:
                folder = f"earlier/round-{submissions[-1]}"
                earlier = self.plan() or self._read(f"{folder}/plan.json", JobPlan)
                if earlier is None:
                    uri = self.storage.uri(self.key("plan.json"))
                    raise DataError(f"{uri} does not exist", next_command="restore it, or use a different --cycle")
                self.archive_records(submissions[-1], end(earlier))
                renew()  # ending the jobs may have taken longer than the lease
                for name in _REPLACED:
                    with suppress(KeyNotFound):
                        data = self.storage.read_bytes(self.key(name))
                        self.storage.write_if_absent(self.key(f"{folder}/{name}"), data)
            # If this process is killed here, submitting the earlier plan again restores the plan and its settings.
            self.storage.delete([self.key(name) for name in ("closed.json", "plan.json", "settings.json")])
        except BaseException:
            self._free(old, etag)
            raise
        first = submissions[-1] + 1 if submissions else old.first_round
        new = Claim(plan_id=plan.plan_id, target=target, claimed_at=old.claimed_at, owner="", first_round=first)
        self._replace(new, etag)

    def _check_lease(self, claim: Claim, owner: str) -> None:
        now = self.clock()
        if claim.owner not in ("", owner) and claim.lease_until > now:
            raise TransientError(
                f"cycle {self.cycle} is being submitted by {claim.owner}",
                expected=f"one submission at a time (the lease expires in {claim.lease_until - now:.0f} s)",
                next_command="run the same command again after that",
            )

    def _claim_for(self, plan: JobPlan, target: str, owner: str, script: str) -> tuple[Claim, str]:
        """Write the claim of this process, and return it with its ETag."""
        now, is_other = self.clock(), False
        claim = Claim(
            plan_id=plan.plan_id, target=target, claimed_at=now, owner=owner, lease_until=now + LEASE_S, script=script
        )
        if not self.storage.write_if_absent(self.key("claim.json"), claim.to_json()):
            etag, existing = self._etag(), self.claim()
            if existing is None:
                raise self._lost()
            is_other = (existing.plan_id, existing.target) != (claim.plan_id, target)
            if is_other and not self._has_no_plan():
                raise ConfigError(
                    f"cycle {self.cycle} was submitted to {existing.target} with other settings",
                    expected=f"the same settings, or a cycle that was not submitted (this is {target})",
                    next_command="run the same command again to see the differences",
                )
            self._check_lease(existing, owner)
            kept = {"claimed_at": existing.claimed_at, "first_round": existing.first_round}
            claim = claim.model_copy(update=kept | {"script": script or existing.script})
            self._replace(claim, etag)
        write_plan = self.storage.write_bytes if is_other else self.storage.write_if_absent
        write_plan(self.key("plan.json"), plan.to_json())
        etag = self._etag()
        if self.claim() != claim:  # the lease has expired in the meantime
            raise self._lost()
        return claim, etag

    def _has_no_plan(self) -> bool:
        """Return whether nothing was submitted. The claim is written first, then the plan, then the first job."""
        return self.storage.stat(self.key("plan.json")) is None and not self.submissions()

    def _replace(self, claim: Claim, etag: str) -> str:
        if not self.storage.write_if_match(self.key("claim.json"), claim.to_json(), etag):
            raise self._lost()
        return self._etag()

    def _free(self, claim: Claim, etag: str) -> None:
        """Release the lease, unless a different process has taken it over."""
        free = claim.model_copy(update={"owner": "", "lease_until": 0.0})
        self.storage.write_if_match(self.key("claim.json"), free.to_json(), etag)

    def _lost(self) -> DataError | TransientError:
        """Return the error to raise if this process no longer owns the claim."""
        uri = self.storage.uri(self.key("claim.json"))
        if not self._etag():
            return DataError(f"{uri} does not exist", next_command="trnjobs status")
        return TransientError(f"{uri}: another process has taken over the cycle", next_command="trnjobs status")

    def _names(self, folder: str) -> list[str]:
        return [stat.key.removeprefix(self.key("")) for stat in self.storage.list(self.key(folder))]

    def _etag(self) -> str:
        stat = self.storage.stat(self.key("claim.json"))
        return stat.etag if stat else ""

    def _read(self, name: str, kind: type[T] | TypeAdapter[T]) -> T | None:
        command = "restore an earlier version of it"
        return read_record(self.storage, self.key(name), kind, "a valid record", "trnjobs", next_command=command)


def claimed_cycles(store: CycleStore, *, runs: bool = False) -> list[str]:
    """Return the sorted names of all claimed cycles. `runs`: whether to include those of `trnjobs run`."""
    return sorted(claims_by_age(store, runs=runs))


def claims_by_age(store: CycleStore, *, runs: bool = False) -> dict[str, Claim | None]:
    """Return the claims of all cycles in the workspace of `store` by name, newest last.

    `runs` is whether to include those of `trnjobs run`, which are not cycles. A claim that cannot be read is returned
    as None, before all others.
    """

    def read(name: str) -> Claim | DataError | None:
        try:
            return replace(store, cycle=name).claim()
        except DataError as error:  # ensure that a damaged claim does not hide the other cycles
            return error

    names = [name for name in store.storage.list_dirs("cycles") if runs or not name.startswith(RUN_PREFIX)]
    results = zip(names, _read_each(store.storage, names, read), strict=True)
    claims = {name: None if isinstance(claim, DataError) else claim for name, claim in results if claim is not None}
    return dict(sorted(claims.items(), key=lambda item: (item[1].claimed_at if item[1] else -inf, item[0])))


def unclosed_cycles(store: CycleStore, names: Sequence[str]) -> list[str]:
    """Return the cycles among `names` that are not closed. They are in the workspace of `store`."""
    ends = _read_each(store.storage, names, lambda name: replace(store, cycle=name).closed())
    return [name for name, closed in zip(names, ends, strict=True) if closed is None]


def _read_each(storage: Storage, names: Sequence[str], read: Callable[[str], T]) -> list[T]:
    return run_parallel(
        read, names, num_threads=NUM_READ_THREADS, stop=storage.stop, doing=f"looking at cycles of {storage.root}"
    )
