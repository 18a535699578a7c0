"""What a workspace knows of a cycle's jobs: one owner at a time, records that survive, one truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.cycle.cycle_store import LEASE_S, Claim, CycleStore, claimed_cycles, claims_by_age, unclosed_cycles
from jobs.cycle.job_states import BlockedJob, Cancel, Closed, JobRecord, JobState, SubmittedJob
from jobs.plan.spec import JobPlan
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.io.storage import Storage, open_storage
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.targets.faults import Faults, faulty
from tests.kit.killing import killed_at

OTHER = plan(job("prepare"), job("train", "prepare"))


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@pytest.fixture
def store(storage: Storage, clock: Clock) -> CycleStore:
    return CycleStore(storage, "2026-11-20", clock)


def claim(store: CycleStore, of: JobPlan, owner: str = "a", target: str = "batch") -> None:
    with store.submitting(of, target, owner):
        pass


def claimed(store: CycleStore) -> Claim:
    found = store.claim()
    assert found is not None
    return found


def record(name: str, id_: str, state: JobState = JobState.FAILED, **more: Any) -> JobRecord:
    return JobRecord(name=name, id=id_, state=state, created_at=1.0, **more)


def test_a_claim_holds_the_plan_and_is_free_afterwards(store: CycleStore, clock: Clock) -> None:
    assert (store.claim(), store.plan(), store.closed(), store.submissions(), store.records()) == (
        None,
        None,
        None,
        [],
        (),
    )
    with store.submitting(cycle(), "batch", "a"):
        held = claimed(store)
        assert (held.owner, held.lease_until, held.target) == ("a", 1000.0 + LEASE_S, "batch")
    clock.now += 1
    claim(store, cycle(), "b")
    after = claimed(store)
    assert (after.owner, after.claimed_at, after.plan_id) == ("", 1000.0, cycle().plan_id)
    assert store.plan() == cycle()


def test_one_submits_at_a_time_until_the_lease_runs_out(store: CycleStore, clock: Clock) -> None:
    with pytest.raises(TransientError, match="taken over the cycle"), store.submitting(cycle(), "batch", "a") as renew:
        for _ in range(2):
            clock.now += LEASE_S - 1
            with pytest.raises(TransientError, match=r"being submitted by a\n.*expires in 1 s"):
                claim(store, cycle(), "b")
            renew()
        clock.now += LEASE_S + 1
        new = store.submitting(cycle(), "batch", "b")
        new.__enter__()
        renew()
    assert claimed(store).owner == "b", "who lost the lease does not free that of the next one"
    new.__exit__(None, None, None)


def test_the_same_owner_may_come_back_at_once(store: CycleStore) -> None:
    """Another attempt of the driver's job."""
    with store.submitting(cycle(), "batch", "a") as renew:
        claim(store, cycle(), "a")
        with pytest.raises(TransientError, match="taken over the cycle"):
            renew()
        store.storage.delete([store.key("claim.json")])
        with pytest.raises(DataError, match=r"claim\.json does not exist"):
            renew()


@pytest.mark.parametrize(("of", "target"), [(plan(job("other")), "batch"), (cycle(), "local")])
def test_a_cycle_belongs_to_one_plan_and_target(store: CycleStore, of: JobPlan, target: str) -> None:
    claim(store, cycle())
    with pytest.raises(ConfigError, match="was submitted to batch with other settings"):
        claim(store, of, target=target)
    assert store.plan() == cycle()
    assert (store.belongs_to_other(of, target), store.belongs_to_other(cycle(), "batch")) == (True, False)


def refused(store: CycleStore, of: JobPlan, *submitted: str) -> None:
    """As the target refuses a queue that does not exist."""
    with pytest.raises(ConfigError, match="no such queue"), store.submitting(of, "batch", "a"):
        store.save_settings({"queue": "typo"})
        for name in submitted:
            store.save_submitted(1, SubmittedJob(job=name, id="1", submitted_at=5.0))
        raise ConfigError("no such queue")


def test_a_plan_that_was_refused_before_any_job_can_be_corrected(store: CycleStore) -> None:
    typo = plan(job("train"), queue="typo")
    refused(store, typo)
    assert list(store.storage.list(store.key(""))) == []
    claim(store, cycle())
    store.storage.delete([store.key("plan.json")])  # as if the process had been killed before it wrote the plan
    refused(store, typo)
    assert store.claim() is None
    claim(store, cycle())
    assert store.plan() == cycle()


@pytest.mark.parametrize("submitted", [(), ("train",)])
def test_what_was_claimed_before_stays_claimed(store: CycleStore, submitted: tuple[str, ...]) -> None:
    """A driver that died may have submitted a job that nobody has recorded."""
    if not submitted:
        claim(store, cycle())
    refused(store, cycle(), *submitted)
    assert (store.plan(), claimed(store).owner) == (cycle(), "")
    with pytest.raises(ConfigError, match="was submitted to batch"):
        claim(store, plan(job("other")))


def test_a_claim_killed_anywhere_keeps_out_another_plan_only_with_a_plan(tmp_path: Path, clock: Clock) -> None:
    """Killed at any change of a file; then the plan has changed, as after a deploy."""
    number, died, taken, other = 0, True, [], plan(job("other"))
    while died:
        number += 1
        store = CycleStore(open_storage(str(tmp_path / str(number))), "c", clock)
        died = killed_at(number, partial(claim, store, cycle())) != 0
        was_claimed, had_plan = store.claim() is not None, store.plan() is not None
        if was_claimed and not had_plan:
            with pytest.raises(TransientError, match="being submitted by a"):
                claim(store, other, "b")
        clock.now += LEASE_S + 1
        if had_plan:
            with pytest.raises(ConfigError, match="was submitted to batch"):
                claim(store, other, "b", "local")
            claim(store, cycle(), "b")
        else:
            claim(store, other, "b", "local")
            held = claimed(store)
            assert (held.plan_id, held.target, store.plan()) == (other.plan_id, "local", other)
        taken.append((was_claimed, had_plan))
    assert {*taken} == {(False, False), (True, False), (True, True)}


def test_who_comes_back_to_find_another_plan_has_lost_the_cycle(
    store: CycleStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept between claim.json and plan.json, for longer than its lease."""
    storage, other = store.storage, plan(job("other"))
    write = storage.write_if_absent

    def write_if_absent(key: str, data: bytes) -> bool:
        if key.endswith("plan.json"):
            monkeypatch.setattr(storage, "write_if_absent", write)
            clock.now += LEASE_S + 1
            claim(store, other, "b")
        return write(key, data)

    monkeypatch.setattr(storage, "write_if_absent", write_if_absent)
    with pytest.raises(TransientError, match="taken over the cycle"):
        claim(store, cycle())
    assert (claimed(store).plan_id, store.plan()) == (other.plan_id, other)


def test_submissions_are_written_once_by_round(store: CycleStore) -> None:
    for submission, name, job_id in ((1, "train", "1"), (1, "embed", "2"), (2, "embed", "3"), (10, "verify", "4")):
        store.save_submitted(submission, SubmittedJob(job=name, id=job_id, submitted_at=5.0))
    assert store.submissions() == [1, 2, 10]
    assert {name: one.id for name, one in store.current().items()} == {"train": "1", "embed": "3", "verify": "4"}
    store.save_submitted(1, SubmittedJob(job="train", id="1", submitted_at=6.0))
    with pytest.raises(TransientError, match="another process submitted this job"):
        store.save_submitted(1, SubmittedJob(job="train", id="2", submitted_at=5.0))
    assert store.submitted(1)["train"] == SubmittedJob(job="train", id="1", submitted_at=5.0)


def test_a_submitted_job_is_read_once_by_a_process(storage: Storage, store: CycleStore, clock: Clock) -> None:
    faults = Faults()
    watched = CycleStore(faulty(storage, faults), store.cycle, clock)
    for name in ("train", "embed"):
        store.save_submitted(1, SubmittedJob(job=name, id="1", submitted_at=5.0))
        assert watched.submitted(1) == store.submitted(1)
    assert faults.calls.count("read_bytes") == 2
    assert replace(watched, cycle="2026-11-21").submitted(1) == {}


def test_records_of_earlier_rounds_are_written_once(store: CycleStore) -> None:
    first = [record("prepare", "1"), record("train", "2")]
    store.archive_records(1, first)
    store.archive_records(1, [])
    assert store.earlier_records(first) == ()
    for submission in range(2, 11):
        store.archive_records(submission, [first[0], record("train", f"of-{submission}")])
    newest = (first[0], record("train", "3"))
    assert [one.id for one in store.earlier_records(newest)] == [
        "2",
        *(f"of-{submission}" for submission in range(2, 11)),
    ]


def test_records_sightings_settings_and_the_end(store: CycleStore) -> None:
    """Two close a cycle: the slower one has read the jobs before the last of them ended."""
    child = record("embed:0", "1:0", JobState.RUNNING)
    stale, last = ((record("embed", "1", state, children=(child,)),) for state in (JobState.PENDING, JobState.FAILED))
    sighting = BlockedJob(job="embed:0", id="1:0", reason="UNDETERMINED", since=2.0)
    store.save_blocked_jobs((sighting,))
    assert store.blocked_jobs() == (sighting,)
    store.save_settings({"a": 1})
    store.save_settings({"a": 2})
    assert store.storage.read_bytes(store.key("settings.json")) == b'{\n "a": 1\n}'
    store.save_records(last)
    store.close(Closed(outcome="failed", at=3.0, reason="train"))
    store.save_records(stale)
    assert (store.records(), store.closed()) == (last, Closed(outcome="failed", at=3.0, reason="train"))
    store.reopen()
    store.save_records(stale)
    assert (store.records(), store.closed()) == (stale, None)


def test_the_end_of_an_earlier_round_is_no_end(store: CycleStore) -> None:
    for submission in (1, 2):
        store.save_submitted(submission, SubmittedJob(job="train", id=str(submission), submitted_at=5.0))
    for of, ends in ((0, False), (1, False), (2, True), (None, True)):  # none: written by an earlier version
        store.close(Closed(outcome="failed", at=3.0, round=of))
        assert (store.closed() is not None) is ends
        assert unclosed_cycles(store, [store.cycle]) == ([] if ends else [store.cycle])


@pytest.mark.parametrize(
    "name",
    [
        "plan.json",
        "records.json",
        "closed.json",
        "blocked.json",
        "cancel.json",
        "claim.json",
        "submitted/round-1/train.json",
    ],
)
def test_a_file_that_is_no_such_record(store: CycleStore, name: str) -> None:
    store.storage.write_bytes(store.key(name), b'{"a": 1}')
    read: dict[str, Callable[[], object]] = {
        "plan": store.plan,
        "records": store.records,
        "closed": store.closed,
        "blocked": store.blocked_jobs,
        "cancel": store.cancels,
    }
    read |= {"claim": store.claim, "submitted/round-1/train": partial(store.submitted, 1)}
    with pytest.raises(DataError, match=f"{name} is not a valid record"):
        read[name.removesuffix(".json")]()


def test_cancellations_of_two_processes_at_the_same_time(storage: Storage, store: CycleStore) -> None:
    first, later = Cancel(reason="first", at=1.0), Cancel(reason="later", at=2.0)
    for meanwhile in (1, 2, 3):  # before one of the calls of the process below
        storage.delete_prefix(store.key(""))
        faults = Faults(meanwhile={meanwhile: lambda: store.save_cancels({"a": first, "b": first})})
        replace(store, storage=faulty(storage, faults)).save_cancels({"b": later, "c": later})
        assert store.cancels() == {"a": first, "b": first, "c": later}


def test_claims_by_age_whatever_the_cycles_are_called(storage: Storage, store: CycleStore, clock: Clock) -> None:
    for name, at in (("check-base", 1.0), ("run-one", 2.0), ("2026-11-21", 3.0), ("2026-11-20", 3.0), ("0-late", 4.0)):
        clock.now = at
        claim(CycleStore(storage, name, clock), cycle())
    storage.write_bytes("cycles/2026-11-19/train/result.json", b"{}")
    ages = [(name, one.claimed_at if one else None) for name, one in claims_by_age(store, runs=True).items()]
    assert ages == [("check-base", 1.0), ("run-one", 2.0), ("2026-11-20", 3.0), ("2026-11-21", 3.0), ("0-late", 4.0)]
    assert claimed_cycles(store) == ["0-late", "2026-11-20", "2026-11-21", "check-base"]
    storage.write_bytes("cycles/2026-11-21/jobs/claim.json", b"{")
    assert list(claims_by_age(store)) == ["2026-11-21", "check-base", "2026-11-20", "0-late"]
    assert claims_by_age(store)["2026-11-21"] is None


def submitted(store: CycleStore, of: JobPlan, *, job_id: str) -> JobRecord:
    """One job of a plan, which has failed."""
    claim(store, of)
    number = max(store.submissions(), default=claimed(store).first_round)
    store.save_submitted(number, SubmittedJob(job=of.jobs[0].name, id=job_id, submitted_at=store.clock()))
    store.save_settings({"of": job_id})
    made = record(of.jobs[0].name, job_id)
    store.save_records((made,))
    store.close(Closed(outcome="failed", at=store.clock(), round=number))
    return made


def records_of(record: JobRecord, earlier: JobPlan) -> Sequence[JobRecord]:
    """Of the one job that was submitted."""
    assert earlier.jobs[0].name == record.name
    return (record,)


def test_another_submission_replaces_the_first_and_keeps_it(store: CycleStore) -> None:
    first = submitted(store, cycle(), job_id="1")
    for _ in range(2):  # the second has nothing to replace
        store.begin_again(OTHER, "local", "me", partial(records_of, first))
        found = claimed(store)
        assert (found.plan_id, found.target, found.first_round, found.claimed_at) == (OTHER.plan_id, "local", 2, 1000.0)
        assert (store.plan(), store.settings(), store.closed(), store.submissions()) == (None, None, None, [])
    assert store.earlier_records(()) == (first,)
    kept = store.storage.read_bytes(store.key("earlier/round-1/plan.json"))
    assert JobPlan.model_validate_json(kept) == cycle()
    typo = plan(job("train"), queue="typo")
    store.begin_again(typo, "batch", "me", partial(records_of, first))
    refused(store, typo)
    assert (claimed(store).first_round, store.plan(), store.submissions()) == (2, None, []), "earlier rounds stay apart"
    submitted(store, cycle(), job_id="3")
    assert (store.submissions(), store.plan()) == ([2], cycle())


def test_nothing_is_replaced_while_somebody_submits_or_against_the_check(store: CycleStore) -> None:
    def refuse(earlier: JobPlan) -> tuple[JobRecord, ...]:
        assert earlier == cycle()
        with pytest.raises(TransientError, match="submitted by me"):
            claim(store, cycle(), owner="other")
        raise ConfigError("it has trained")

    claim(store, cycle())
    with store.submitting(cycle(), "batch", "other"), pytest.raises(TransientError, match="submitted by other"):
        store.begin_again(OTHER, "batch", "me", lambda _: ())
    store.begin_again(OTHER, "batch", "me", lambda _: pytest.fail("no job was submitted: there is nothing to end"))
    claim(store, OTHER)
    assert (store.plan(), claimed(store).first_round, store.earlier_records(())) == (OTHER, 1, ())
    store.begin_again(cycle(), "batch", "me", lambda _: ())
    submitted(store, cycle(), job_id="1")
    with pytest.raises(ConfigError, match="it has trained"):
        store.begin_again(OTHER, "batch", "me", refuse)
    claim(store, cycle(), owner="other")
    assert (store.plan(), store.settings(), store.submissions()) == (cycle(), {"of": "1"}, [1])


def test_a_replacement_killed_anywhere_leaves_one_of_the_two(tmp_path: Path, clock: Clock) -> None:
    number, ends = 0, set[bool]()
    while True:
        number += 1
        store = CycleStore(open_storage(str(tmp_path / f"{number}")), "2026-11-20", clock)
        first = submitted(store, cycle(), job_id="1")
        replace = partial(store.begin_again, OTHER, "batch", end=partial(records_of, first))
        died = killed_at(number, partial(replace, owner="a"))
        clock.now += LEASE_S + 1
        ends.add(is_new := claimed(store).plan_id == OTHER.plan_id)
        if is_new:
            assert (store.plan(), store.submissions()) == (None, [])
        else:  # it goes on as if nothing had been asked for
            assert store.plan() in (cycle(), None) and store.submissions() == [1]
            if number % 2:
                claim(store, cycle(), owner="b")
                assert store.plan() == cycle()
        replace(owner="b")
        second = submitted(store, OTHER, job_id="2")
        assert (store.submissions(), store.plan(), store.settings(), store.records()) == (
            [2],
            OTHER,
            {"of": "2"},
            (second,),
        )
        assert store.earlier_records((second,)) == (first,), number
        if not died:
            break
    assert ends == {False, True} and number > 10
