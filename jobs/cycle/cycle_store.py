"""The jobs of a cycle as the workspace knows them: `cycles/<cycle>/jobs/`.

claim.json               whose cycle it is: the plan, the target, and who submits at this moment (a lease)
plan.json, settings.json what was submitted
submitted/round-<n>/     one file a job, written once; a round is a submission or a `trnjobs retry`
records.json             what became of the jobs (AWS Batch forgets them after a week)
records/round-<n>.json   the same of an earlier round, written once, before the next one begins
earlier/round-<n>/       claim, plan and settings of a submission that another one replaced after round n (--fresh)
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

from jobs.cycle.job_states import BlockedJob, Closed, JobRecord, SubmittedJob
from jobs.plan.cycle import RUN_PREFIX
from jobs.plan.spec import JobPlan
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.format import natural_key
from pipeline.core.record import Record
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage

LEASE_S = 120.0
NUM_READ_THREADS = 16
_RECORDS = TypeAdapter(tuple[JobRecord, ...])
_SIGHTINGS = TypeAdapter(tuple[BlockedJob, ...])
_SETTINGS = TypeAdapter(dict[str, Any])
_REPLACED = ("claim.json", "plan.json", "settings.json")
T = TypeVar("T")


class Claim(Record):
    """Whose cycle it is. A lease that ran out may be taken over."""

    plan_id: str
    target: str
    claimed_at: float
    owner: str = Field(description="Who submits; empty when nobody does")
    lease_until: float = 0.0
    first_round: int = Field(1, description="Rounds before this one are of submissions that it has replaced (--fresh)")
    script: str = Field(
        "", description="SHA-256 of the file that trnjobs run has run on this machine; empty: not known"
    )


@dataclass(frozen=True)
class CycleStore:
    """One cycle's jobs in a workspace. `clock`: seconds since 1970."""

    storage: Storage
    cycle: str
    clock: Callable[[], float]

    def key(self, name: str) -> str:
        return f"cycles/{self.cycle}/jobs/{name}"

    @contextmanager
    def submitting(self, plan: JobPlan, target: str, owner: str, script: str = "") -> Iterator[Callable[[], None]]:
        """Claim the cycle for a plan and be the only one who submits it; yields a function that renews the lease.

        `script`: digest of the file that is to run; empty: the one on record stays.

        A new claim is withdrawn when the plan is refused before any job was submitted, so that another can be claimed.
        One without plan.json counts as new: whoever made it died before it could submit anything. Raises ConfigError
        when the cycle belongs to another plan or target, TransientError while somebody else submits it (or took the
        lease over meanwhile).
        """
        is_new = self._has_no_plan()
        mine, etag = self._take(plan, target, owner, script)

        def renew() -> None:
            nonlocal mine, etag
            mine = mine.model_copy(update={"lease_until": self.clock() + LEASE_S})
            etag = self._replace(mine, etag)

        try:
            yield renew
        except ConfigError:
            if is_new and not self.submissions() and self._etag() == etag:
                self.storage.delete([self.key("settings.json"), self.key("plan.json")])
                if mine.first_round == 1:  # else it also says which rounds are of an earlier submission
                    self.storage.delete([self.key("claim.json")])
            raise
        finally:  # after kill -9 the lease runs out
            self._free(mine, etag)

    def claim(self) -> Claim | None:
        """None when nobody has claimed the cycle."""
        return self._read("claim.json", Claim.model_validate_json)

    def plan(self) -> JobPlan | None:
        """Return the plan that was submitted; None before. Raises DataError when it cannot be read."""
        return self._read("plan.json", JobPlan.model_validate_json)

    def save_settings(self, settings: Mapping[str, Any]) -> None:
        """Store the settings with which every job of the cycle runs. The first to write wins."""
        self.storage.write_if_absent(self.key("settings.json"), json.dumps(settings, indent=1).encode())

    def settings(self) -> dict[str, Any] | None:
        """Return the settings that were submitted, as a tree; None before. Raises DataError if they are unreadable."""
        return self._read("settings.json", _SETTINGS.validate_json)

    def submissions(self) -> list[int]:
        """Submission rounds of the plan; empty before its first job was submitted. From 1, or from where it replaced
        another plan.
        """
        submissions, claim = self._all_submissions(), self.claim()
        return [one for one in submissions if claim is None or one >= claim.first_round]

    def _all_submissions(self) -> list[int]:
        """Also those of submissions that were replaced."""
        folders = self.storage.list_dirs(self.key("submitted"))
        return sorted(int(name.removeprefix("round-")) for name in folders)

    def submitted(self, submission: int) -> dict[str, SubmittedJob]:
        names = self._names(f"submitted/round-{submission}")
        found = [self._read(name, SubmittedJob.model_validate_json) for name in names]
        return {one.job: one for one in found if one}

    def current(self) -> dict[str, SubmittedJob]:
        """Return the newest submission of each job."""
        return {name: one for submission in self.submissions() for name, one in self.submitted(submission).items()}

    def save_submitted(self, submission: int, submitted_job: SubmittedJob) -> None:
        """Record a job that was handed over; the first to write wins.

        Raises TransientError when another process has made another job of it.
        """
        name = f"submitted/round-{submission}/{submitted_job.job}.json"
        if self.storage.write_if_absent(self.key(name), submitted_job.model_dump_json().encode()):
            return
        theirs = self._read(name, SubmittedJob.model_validate_json)
        if theirs is None or theirs.id != submitted_job.id:
            raise TransientError(
                f"{self.storage.uri(self.key(name))}: another process submitted this job", next_command="trnjobs status"
            )

    def records(self) -> tuple[JobRecord, ...]:
        """Return what was last known of the jobs; empty before anything was."""
        return self._read("records.json", _RECORDS.validate_json) or ()

    def save_records(self, records: tuple[JobRecord, ...]) -> None:
        """Store what is known of the jobs now. Those of a closed cycle stay: another has seen its end meanwhile."""
        if self.closed() is None:
            self.storage.write_bytes(self.key("records.json"), _RECORDS.dump_json(records, indent=1))

    def archive_records(self, submission: int, records: Sequence[JobRecord]) -> None:
        """Before another round begins, whose records take the place of these. The first to write wins."""
        key = self.key(f"records/round-{submission}.json")
        self.storage.write_if_absent(key, _RECORDS.dump_json(tuple(records), indent=1))

    def earlier_records(self, records: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
        """Of jobs that were submitted again, in the order of rounds. `records`: the newest of each job."""
        found = dict[str, JobRecord]()
        for name in sorted(self._names("records"), key=natural_key):  # round-9 is before round-10
            found |= {one.id: one for one in self._read(name, _RECORDS.validate_json) or ()}
        newest = {one.id for one in records}
        return tuple(one for one in found.values() if one.id not in newest)

    def blocked_jobs(self) -> tuple[BlockedJob, ...]:
        return self._read("blocked.json", _SIGHTINGS.validate_json) or ()

    def save_blocked_jobs(self, blocked_jobs: tuple[BlockedJob, ...]) -> None:
        self.storage.write_bytes(self.key("blocked.json"), _SIGHTINGS.dump_json(blocked_jobs, indent=1))

    def closed(self) -> Closed | None:
        """None while the cycle is under way, also where somebody retried it while another process closed it."""
        found = self._read("closed.json", Closed.model_validate_json)
        is_earlier = (
            found is not None and found.round is not None and found.round < max(self._all_submissions(), default=0)
        )
        return None if is_earlier else found

    def close(self, closed: Closed) -> None:
        self.storage.write_bytes(self.key("closed.json"), _bytes(closed))

    def reopen(self) -> None:
        """Delete the end of the cycle: with a retry of jobs that failed it is under way again."""
        self.storage.delete([self.key("closed.json")])

    def belongs_to_other(self, plan: JobPlan, target: str) -> bool:
        """Whether another plan was submitted, or this one to another target."""
        theirs = self.claim()
        is_other = theirs is not None and (theirs.plan_id, theirs.target) != (plan.plan_id, target)
        return is_other and not self._has_no_plan()

    def begin_again(
        self, plan: JobPlan, target: str, owner: str, end: Callable[[JobPlan], Sequence[JobRecord]]
    ) -> None:
        """Let another submission replace the one on record, whose plan, settings and records are kept.

        `end` is called while nobody else can submit: it returns the final records of the jobs, or raises what must stop
        this. One write of the claim replaces the submission: killed before it, the earlier one is still on record.
        Nothing is done where nothing was submitted, or the plan is there and none of its jobs.
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
                earlier = self.plan() or self._read(f"{folder}/plan.json", JobPlan.model_validate_json)
                if earlier is None:
                    uri = self.storage.uri(self.key("plan.json"))
                    raise DataError(f"{uri} is gone", next_command="restore it, or another --cycle")
                self.archive_records(submissions[-1], end(earlier))
                renew()  # to end jobs may take longer than the lease
                for name in _REPLACED:
                    if (data := self._read(name, bytes)) is not None:
                        self.storage.write_if_absent(self.key(f"{folder}/{name}"), data)
            # Killed after this, whoever submits the earlier plan again writes it and its settings again.
            self.storage.delete([self.key(name) for name in ("closed.json", "plan.json", "settings.json")])
        except BaseException:
            self._free(old, etag)
            raise
        first = submissions[-1] + 1 if submissions else old.first_round
        new = Claim(plan_id=plan.plan_id, target=target, claimed_at=old.claimed_at, owner="", first_round=first)
        self._replace(new, etag)

    def _check_lease(self, theirs: Claim, owner: str) -> None:
        now = self.clock()
        if theirs.owner not in ("", owner) and theirs.lease_until > now:
            raise TransientError(
                f"cycle {self.cycle} is being submitted by {theirs.owner}",
                expected=f"one at a time; its lease runs out in {theirs.lease_until - now:.0f} s",
                next_command="run the same command again then",
            )

    def _take(self, plan: JobPlan, target: str, owner: str, script: str) -> tuple[Claim, str]:
        """Return the claim of this process, and its etag."""
        now, is_other = self.clock(), False
        mine = Claim(
            plan_id=plan.plan_id, target=target, claimed_at=now, owner=owner, lease_until=now + LEASE_S, script=script
        )
        if not self.storage.write_if_absent(self.key("claim.json"), _bytes(mine)):
            etag, theirs = self._etag(), self.claim()
            if theirs is None:
                raise self._lost()
            is_other = (theirs.plan_id, theirs.target) != (mine.plan_id, target)
            if is_other and not self._has_no_plan():
                raise ConfigError(
                    f"cycle {self.cycle} was submitted to {theirs.target} with other settings",
                    expected=f"those, or a cycle nobody has submitted (this is {target})",
                    next_command="the same command again: it names what differs",
                )
            self._check_lease(theirs, owner)
            kept = {"claimed_at": theirs.claimed_at, "first_round": theirs.first_round}
            mine = mine.model_copy(update=kept | {"script": script or theirs.script})
            self._replace(mine, etag)
        write_plan = self.storage.write_bytes if is_other else self.storage.write_if_absent
        write_plan(self.key("plan.json"), _bytes(plan))
        etag = self._etag()
        if self.claim() != mine:  # this process was slower than its lease
            raise self._lost()
        return mine, etag

    def _has_no_plan(self) -> bool:
        """plan.json follows the claim, and the first job follows plan.json."""
        return self.storage.stat(self.key("plan.json")) is None and not self.submissions()

    def _replace(self, claim: Claim, etag: str) -> str:
        if not self.storage.write_if_match(self.key("claim.json"), _bytes(claim), etag):
            raise self._lost()
        return self._etag()

    def _free(self, claim: Claim, etag: str) -> None:
        """Give up the lease; a claim that another process took over stays as it is."""
        free = claim.model_copy(update={"owner": "", "lease_until": 0.0})
        self.storage.write_if_match(self.key("claim.json"), _bytes(free), etag)

    def _lost(self) -> DataError | TransientError:
        """Return the error for a claim that is no longer that of this process."""
        uri = self.storage.uri(self.key("claim.json"))
        if not self._etag():
            return DataError(f"{uri} is gone", next_command="trnjobs status")
        return TransientError(f"{uri}: another process took the cycle over", next_command="trnjobs status")

    def _names(self, folder: str) -> list[str]:
        return [stat.key.removeprefix(self.key("")) for stat in self.storage.list(self.key(folder))]

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


def _bytes(record: Record) -> bytes:
    return record.model_dump_json(indent=1).encode()


def claimed_cycles(store: CycleStore, *, runs: bool = False) -> list[str]:
    """Return the names of the cycles with jobs, in their own order; arguments as below."""
    return sorted(claims_by_age(store, runs=runs))


def claims_by_age(store: CycleStore, *, runs: bool = False) -> dict[str, Claim | None]:
    """Return by name the claims of the cycles in the workspace of `store`, the newest last.

    `runs`: also of what `trnjobs run` has submitted, which is no cycle.

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
    """Return those of these cycles, in the workspace of `store`, that nobody has closed; in their order."""
    found = _of_each(store.storage, names, lambda name: replace(store, cycle=name).closed())
    return [name for name, closed in zip(names, found, strict=True) if closed is None]


def _of_each(storage: Storage, names: Sequence[str], read: Callable[[str], T]) -> list[T]:
    return run_parallel(
        read, names, num_threads=NUM_READ_THREADS, stop=storage.stop, doing=f"looking at cycles of {storage.root}"
    )
