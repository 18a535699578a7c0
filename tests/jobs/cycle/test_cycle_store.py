"""What a workspace knows of a cycle's jobs: one owner at a time, records that survive, one truth."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.cycle.cycle_store import LEASE_S, Claim, CycleStore, claimed_cycles, claims_by_age, unclosed_cycles
from jobs.cycle.job_records import Closed, JobRecord, JobState, Sighting, Submission
from jobs.plan.dag import Plan
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.io.storage import Storage, open_storage
from tests.jobs.cycle.cases import cycle, job, plan
from tests.kit.killing import killed_at


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


def claim(store: CycleStore, of: Plan, owner: str = "a", target: str = "batch") -> None:
    with store.submitting(of, target, owner):
        pass


def claimed(store: CycleStore) -> Claim:
    found = store.claim()
    assert found is not None
    return found


def test_nothing_is_known_of_a_new_cycle(store: CycleStore) -> None:
    assert (store.claim(), store.plan(), store.closed()) == (None, None, None)
    assert (store.rounds(), store.current(), store.records(), store.sightings()) == ([], {}, (), ())


def test_a_claim_holds_the_plan_and_is_free_afterwards(store: CycleStore, clock: Clock) -> None:
    with store.submitting(cycle(), "batch", "a"):
        held = claimed(store)
        assert (held.owner, held.lease_until, held.target) == ("a", 1000.0 + LEASE_S, "batch")
    clock.now += 1
    claim(store, cycle(), "b")
    after = claimed(store)
    assert (after.owner, after.claimed_at, after.plan_id) == ("", 1000.0, cycle().plan_id)
    assert store.plan() == cycle()


def test_one_submits_at_a_time_until_the_lease_runs_out(store: CycleStore, clock: Clock) -> None:
    with (
        pytest.raises(TransientError, match="another process took the cycle over"),
        store.submitting(cycle(), "batch", "a") as renew,
    ):
        clock.now += LEASE_S - 1
        with pytest.raises(TransientError, match=r"being submitted by a\n.*runs out in 1 s"):
            claim(store, cycle(), "b")
        renew()
        clock.now += LEASE_S - 1
        with pytest.raises(TransientError, match="being submitted by a"):
            claim(store, cycle(), "b")
        clock.now += 2
        claim(store, cycle(), "b")
        renew()


def test_the_same_owner_may_come_back_at_once(store: CycleStore) -> None:
    """Another attempt of the driver's job."""
    with store.submitting(cycle(), "batch", "a") as renew:
        claim(store, cycle(), "a")
        with pytest.raises(TransientError, match="another process took the cycle over"):
            renew()


def test_a_claim_that_somebody_deleted_is_not_told_as_taken_over(store: CycleStore) -> None:
    with (
        pytest.raises(DataError, match=r"claim\.json is gone"),
        store.submitting(cycle(), "batch", "a") as renew,
    ):
        store.storage.delete([store.key("claim.json")])
        renew()


def test_who_lost_the_lease_does_not_free_the_next_one_s(store: CycleStore, clock: Clock) -> None:
    with store.submitting(cycle(), "batch", "a"):
        clock.now += LEASE_S + 1
        new = store.submitting(cycle(), "batch", "b")
        new.__enter__()
    held = claimed(store)
    assert held.owner == "b"
    new.__exit__(None, None, None)


@pytest.mark.parametrize(("of", "target"), [(plan(job("other")), "batch"), (cycle(), "local")])
def test_a_cycle_belongs_to_one_plan_and_target(store: CycleStore, of: Plan, target: str) -> None:
    claim(store, cycle())
    with pytest.raises(ConfigError, match="was submitted to batch with other settings"):
        claim(store, of, target=target)
    assert store.plan() == cycle()
    assert (store.belongs_to_other(of, target), store.belongs_to_other(cycle(), "batch")) == (True, False)


def refused(store: CycleStore, of: Plan) -> None:
    """As the target refuses a queue that does not exist."""
    with pytest.raises(ConfigError, match="no such queue"), store.submitting(of, "batch", "a"):
        store.save_settings({"queue": "typo"})
        raise ConfigError("no such queue")


def test_a_plan_that_was_refused_before_any_job_can_be_corrected(store: CycleStore, storage: Storage) -> None:
    refused(store, plan(job("train"), queue="typo"))
    assert list(storage.list(store.key(""))) == []
    claim(store, cycle())
    assert store.plan() == cycle()


def test_what_was_claimed_before_stays_claimed(store: CycleStore) -> None:
    """A driver that died may have submitted a job that nobody has recorded."""
    claim(store, cycle())
    refused(store, cycle())
    assert store.plan() == cycle()
    with pytest.raises(ConfigError, match="was submitted to batch"):
        claim(store, plan(job("other")))


def test_a_plan_with_a_job_on_record_stays(store: CycleStore) -> None:
    with pytest.raises(ConfigError), store.submitting(cycle(), "batch", "a"):
        store.save_submission(1, Submission(job="train", id="1", submitted_at=5.0))
        raise ConfigError("the second job is refused")
    held = claimed(store)
    assert (held.owner, store.plan()) == ("", cycle())


def test_killed_at_any_file_change_a_claim_can_be_taken_after_its_lease(tmp_path: Path, clock: Clock) -> None:
    number, died = 0, True
    while died:
        number += 1
        store = CycleStore(open_storage(str(tmp_path / str(number))), "c", clock)
        died = killed_at(number, lambda store=store: claim(store, cycle())) != 0  # type: ignore[misc]
        clock.now += LEASE_S + 1
        claim(store, cycle(), "b")
        assert store.plan() == cycle()
    assert number > 5


def test_a_claim_without_a_plan_does_not_keep_out_another_plan(tmp_path: Path, clock: Clock) -> None:
    """Killed behind claim.json; then the plan has changed, as after a deploy."""
    number, died, taken, other = 0, True, [], plan(job("other"))
    while died:
        number += 1
        store = CycleStore(open_storage(str(tmp_path / str(number))), "c", clock)
        died = killed_at(number, lambda store=store: claim(store, cycle())) != 0  # type: ignore[misc]
        was_claimed, had_plan = store.claim() is not None, store.plan() is not None
        if was_claimed and not had_plan:
            with pytest.raises(TransientError, match="being submitted by a"):
                claim(store, other, "b")
        clock.now += LEASE_S + 1
        if had_plan:
            with pytest.raises(ConfigError, match="was submitted to batch"):
                claim(store, other, "b", "local")
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
    with pytest.raises(TransientError, match="another process took the cycle over"):
        claim(store, cycle())
    held = claimed(store)
    assert (held.plan_id, store.plan()) == (other.plan_id, other)


def test_a_refused_plan_that_was_only_claimed_before_can_be_corrected(store: CycleStore, clock: Clock) -> None:
    claim(store, cycle())
    store.storage.delete([store.key("plan.json")])
    refused(store, plan(job("train"), queue="typo"))
    assert store.claim() is None


def test_submissions_by_round_and_the_newest_of_each_job(store: CycleStore) -> None:
    for round_, name, job_id in ((1, "train", "1"), (1, "embed", "2"), (2, "embed", "3"), (10, "verify", "4")):
        store.save_submission(round_, Submission(job=name, id=job_id, submitted_at=5.0))
    assert store.rounds() == [1, 2, 10]
    assert {name: one.id for name, one in store.submitted(1).items()} == {"train": "1", "embed": "2"}
    assert {name: one.id for name, one in store.current().items()} == {"train": "1", "embed": "3", "verify": "4"}


def test_a_submission_is_written_once(store: CycleStore) -> None:
    first = Submission(job="train", id="1", submitted_at=5.0)
    store.save_submission(1, first)
    store.save_submission(1, first.model_copy(update={"submitted_at": 6.0}))
    with pytest.raises(TransientError, match="another process submitted this job"):
        store.save_submission(1, first.model_copy(update={"id": "2"}))
    assert store.submitted(1) == {"train": first}


def test_records_of_earlier_rounds_are_written_once(store: CycleStore) -> None:
    def of(name: str, id_: str, at: float) -> JobRecord:
        return JobRecord(name=name, id=id_, state=JobState.FAILED, created_at=at)

    first = [of("prepare", "1", 1.0), of("train", "2", 1.0)]
    assert store.earlier_records(first) == ()
    store.keep_records(1, first)
    store.keep_records(1, [])
    assert store.earlier_records(first) == ()
    for round_ in range(2, 11):
        store.keep_records(round_, [first[0], of("train", f"of-{round_}", 2.0)])
    newest = (first[0], of("train", "3", 9.0))
    assert [one.id for one in store.earlier_records(newest)] == ["2", *(f"of-{round_}" for round_ in range(2, 11))]


def test_records_sightings_settings_and_the_end(store: CycleStore, storage: Storage) -> None:
    child = JobRecord(name="embed:0", id="1:0", state=JobState.RUNNING, created_at=1.0)
    record = JobRecord(name="embed", id="1", state=JobState.PENDING, created_at=1.0, children=(child,))
    store.save_records((record,))
    assert store.records() == (record,)
    sighting = Sighting(job="embed:0", id="1:0", reason="UNDETERMINED", since=2.0)
    store.save_sightings((sighting,))
    assert store.sightings() == (sighting,)
    store.save_settings({"a": 1})
    store.save_settings({"a": 2})
    assert storage.read_bytes(store.key("settings.json")) == b'{\n "a": 1\n}'
    store.close(Closed(outcome="failed", at=3.0, reason="train"))
    assert store.closed() == Closed(outcome="failed", at=3.0, reason="train")
    store.reopen()
    assert store.closed() is None


def test_records_of_a_closed_cycle_stay(store: CycleStore) -> None:
    """Two close a cycle: the slower one has read the jobs before the last of them ended."""
    last, stale = (
        (JobRecord(name="report", id="1", state=state, created_at=1.0),)
        for state in (JobState.SUCCEEDED, JobState.RUNNING)
    )
    store.save_records(last)
    store.close(Closed(outcome="succeeded", at=3.0))
    store.save_records(stale)
    assert store.records() == last
    store.reopen()
    store.save_records(stale)
    assert store.records() == stale


def test_the_end_of_an_earlier_round_is_no_end(store: CycleStore) -> None:
    for round_ in (1, 2):
        store.save_submission(round_, Submission(job="train", id=str(round_), submitted_at=5.0))
    for of, ends in ((0, False), (1, False), (2, True), (None, True)):  # none: written by an earlier version
        store.close(Closed(outcome="failed", at=3.0, round=of))
        assert (store.closed() is not None) is ends
        assert unclosed_cycles(store, [store.cycle]) == ([] if ends else [store.cycle])


@pytest.mark.parametrize("name", ["plan.json", "records.json", "closed.json", "blocked.json", "claim.json"])
def test_a_file_that_is_no_such_record(store: CycleStore, storage: Storage, name: str) -> None:
    storage.write_bytes(store.key(name), b'{"a": 1}')
    read = {"plan": store.plan, "records": store.records, "closed": store.closed, "blocked": store.sightings}
    with pytest.raises(DataError, match=f"{name} is not a valid record"):
        read.get(name.removesuffix(".json"), store.claim)()


def test_a_broken_submission_names_its_file(store: CycleStore, storage: Storage) -> None:
    storage.write_bytes(store.key("submitted/round-1/train.json"), b"{")
    with pytest.raises(DataError, match=r"round-1/train.json is not a valid record"):
        store.submitted(1)


def test_claimed_cycles(storage: Storage, store: CycleStore, clock: Clock) -> None:
    for name in ("2026-11-21", "2026-11-20"):
        claim(CycleStore(storage, name, clock), cycle())
    storage.write_bytes("cycles/2026-11-19/train/result.json", b"{}")
    assert claimed_cycles(store) == ["2026-11-20", "2026-11-21"]


def test_claims_by_age_whatever_the_cycles_are_called(storage: Storage, store: CycleStore, clock: Clock) -> None:
    for name, at in (("check-base", 1.0), ("run-one", 2.0), ("2026-11-21", 3.0), ("2026-11-20", 3.0), ("0-late", 4.0)):
        clock.now = at
        claim(CycleStore(storage, name, clock), cycle())
    storage.write_bytes("cycles/2026-11-19/train/result.json", b"{}")
    ages = [(name, one.claimed_at if one else None) for name, one in claims_by_age(store, runs=True).items()]
    assert ages == [("check-base", 1.0), ("run-one", 2.0), ("2026-11-20", 3.0), ("2026-11-21", 3.0), ("0-late", 4.0)]
    assert list(claims_by_age(store)) == ["check-base", "2026-11-20", "2026-11-21", "0-late"]
    storage.write_bytes("cycles/2026-11-21/jobs/claim.json", b"{")
    assert list(claims_by_age(store)) == ["2026-11-21", "check-base", "2026-11-20", "0-late"]
    assert claims_by_age(store)["2026-11-21"] is None


def test_cycles_are_looked_at_side_by_side_and_stay_in_order(
    storage: Storage, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request waits for another one to be under way: one after the other they would wait in vain."""
    names = [f"cycle-{number}" for number in range(8)]
    for name in names:
        store = CycleStore(storage, name, clock)
        claim(store, cycle())
        if name != "cycle-3":
            store.close(Closed(outcome="succeeded", at=1.0))
    both = threading.Barrier(2, timeout=60)

    def met(call: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda key: (both.wait(), call(key))[1]

    for request in ("stat", "read_bytes"):
        monkeypatch.setattr(storage, request, met(getattr(storage, request)))
    assert claimed_cycles(store) == names
    assert unclosed_cycles(store, names) == ["cycle-3"]
    assert list(claims_by_age(store)) == names


OTHER = plan(job("prepare"), job("train", "prepare"))


def submitted(store: CycleStore, of: Plan, *, job_id: str) -> JobRecord:
    """One job of a plan, which has failed."""
    claim(store, of)
    held = claimed(store)
    number = max(store.rounds(), default=held.first_round)
    store.save_submission(number, Submission(job=of.jobs[0].name, id=job_id, submitted_at=store.clock()))
    store.save_settings({"of": job_id})
    record = JobRecord(name=of.jobs[0].name, id=job_id, state=JobState.FAILED, created_at=store.clock())
    store.save_records((record,))
    store.close(Closed(outcome="failed", at=store.clock(), round=number))
    return record


def records_of(record: JobRecord, earlier: Plan) -> tuple[JobRecord, ...]:
    """Of the one job that was submitted."""
    assert earlier.jobs[0].name == record.name
    return (record,)


def test_another_submission_replaces_the_first_and_keeps_it(store: CycleStore, clock: Clock) -> None:
    first = submitted(store, cycle(), job_id="1")
    for _ in range(2):  # the second has nothing to replace
        store.begin_again(OTHER, "local", "me", partial(records_of, first))
        found = claimed(store)
        assert (found.plan_id, found.target, found.first_round, found.claimed_at) == (OTHER.plan_id, "local", 2, 1000.0)
        assert (store.plan(), store.settings(), store.closed(), store.rounds()) == (None, None, None, [])
    clock.now += 1
    claim(store, OTHER, target="local")
    found = claimed(store)
    assert (store.plan(), found.first_round) == (OTHER, 2)
    assert store.earlier_records(()) == (first,)
    kept = store.storage.read_bytes(store.key("earlier/round-1/plan.json"))
    assert Plan.model_validate_json(kept) == cycle()


def test_a_plan_of_which_no_job_was_submitted_gives_way_without_a_trace(store: CycleStore) -> None:
    claim(store, cycle())
    with store.submitting(cycle(), "batch", "other"), pytest.raises(TransientError, match="submitted by other"):
        store.begin_again(OTHER, "batch", "me", lambda _: pytest.fail("there is nothing to end"))
    store.begin_again(OTHER, "batch", "me", lambda _: pytest.fail("there is nothing to end"))
    claim(store, OTHER)
    held = claimed(store)
    assert (store.plan(), held.first_round, store.earlier_records(())) == (OTHER, 1, ())


def test_nothing_is_replaced_while_somebody_submits_or_against_the_check(store: CycleStore) -> None:
    submitted(store, cycle(), job_id="1")
    with store.submitting(cycle(), "batch", "other"), pytest.raises(TransientError, match="submitted by other"):
        store.begin_again(OTHER, "batch", "me", lambda _: ())

    def refuse(earlier: Plan) -> tuple[JobRecord, ...]:
        assert earlier == cycle()
        with pytest.raises(TransientError, match="submitted by me"):
            claim(store, cycle(), owner="other")
        raise ConfigError("it has trained")

    with pytest.raises(ConfigError, match="it has trained"):
        store.begin_again(OTHER, "batch", "me", refuse)
    claim(store, cycle(), owner="other")
    assert (store.plan(), store.settings(), store.rounds()) == (cycle(), {"of": "1"}, [1])


def test_a_replacement_that_the_target_refuses_keeps_the_earlier_rounds_apart(store: CycleStore) -> None:
    first = submitted(store, cycle(), job_id="1")
    store.begin_again(OTHER, "batch", "me", partial(records_of, first))
    refused(store, OTHER)
    held = claimed(store)
    assert (held.first_round, store.plan(), store.rounds()) == (2, None, [])
    submitted(store, cycle(), job_id="3")
    assert (store.rounds(), store.plan()) == ([2], cycle())


def test_a_replacement_killed_anywhere_leaves_one_of_the_two(tmp_path: Path, clock: Clock) -> None:
    number, ends = 0, set[bool]()
    while True:
        number += 1
        store = CycleStore(open_storage(str(tmp_path / f"{number}")), "2026-11-20", clock)
        first = submitted(store, cycle(), job_id="1")
        replace = partial(store.begin_again, OTHER, "batch", end=partial(records_of, first))
        died = killed_at(number, partial(replace, owner="a"))
        clock.now += LEASE_S + 1
        held = claimed(store)
        ends.add(is_new := held.plan_id == OTHER.plan_id)
        if is_new:
            assert (store.plan(), store.rounds()) == (None, [])
        else:  # it goes on as if nothing had been asked for
            assert store.plan() in (cycle(), None) and store.rounds() == [1]
            if number % 2:
                claim(store, cycle(), owner="b")
                assert store.plan() == cycle()
        replace(owner="b")
        second = submitted(store, OTHER, job_id="2")
        assert (store.rounds(), store.plan(), store.settings(), store.records()) == ([2], OTHER, {"of": "2"}, (second,))
        assert store.earlier_records((second,)) == (first,), number
        if not died:
            break
    assert ends == {False, True} and number > 10


def test_rounds_and_replaced_submissions_count_by_number(store: CycleStore) -> None:
    """The ninth is before the tenth: of rounds, of records and of what was replaced after them."""
    plans = [plan(job(f"job-{number}")) for number in range(12)]
    records = list[JobRecord]()
    for number, one in enumerate(plans):
        if number:
            store.begin_again(one, "batch", "a", partial(records_of, records[-1]))
        records.append(submitted(store, one, job_id=f"{number}"))
    assert (store.rounds(), store.earlier_records(records[-1:])) == ([12], tuple(records[:-1]))
