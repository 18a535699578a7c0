"""The simulator: what must hold for every decay kernel, and small schedules worked out by hand."""

from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fairshare.policy import FairSharePolicy, ShareWeight
from bench.fairshare.simulate import Knobs, Replay, replay
from bench.fairshare.usage import Kernel
from bench.fairshare.workload import Mix, SimulatedJob, Workload, generate
from pipeline.core.errors import ConfigError

every_kernel = pytest.mark.parametrize("kernel", Kernel)


def job(share: str, index: int, **fields: object) -> SimulatedJob:
    return SimulatedJob.model_validate(
        {"id": f"{share}{index}", "share": share, "submit_s": 0.0, "duration_s": 60.0, "vcpus": 1, **fields}
    )


def weights(reservation: int = 0, decay_s: int = 3600, **by_share: float) -> FairSharePolicy:
    return policy_of(by_share, reservation, decay_s)


def policy_of(by_share: Mapping[str, float], reservation: int = 0, decay_s: int = 3600) -> FairSharePolicy:
    shares = tuple(ShareWeight(share_identifier=name, weight=weight) for name, weight in by_share.items())
    return FairSharePolicy(share_decay_s=decay_s, compute_reservation=reservation, shares=shares)


def consumed_until(replayed: Replay, end_s: float) -> dict[str, float]:
    """vCPU-seconds by share before a moment."""
    total = defaultdict[str, float](float)
    for run in replayed.runs:
        for start in run.starts_s:
            total[run.job.share] += max(0.0, min(run.end_s, end_s) - start) * run.job.size
    return total


def contention(ratio_of: dict[str, float], kernel: Kernel) -> dict[str, float]:
    """Parts of the first hours on 4 vCPU, all shares with more to do than there is."""
    work = Workload(jobs=tuple(job(share, i, duration_s=60.0 + i % 7) for share in ratio_of for i in range(4000)))
    used = consumed_until(replay(work, policy_of(ratio_of), 4, Knobs(kernel)), 50_000.0)
    return {share: seconds / sum(used.values()) for share, seconds in used.items()}


@every_kernel
def test_equal_weights_come_to_equal_usage(kernel: Kernel) -> None:
    parts = contention({"a": 1.0, "b": 1.0}, kernel)
    assert parts["a"] == pytest.approx(0.5, abs=0.02)


@every_kernel
def test_weights_of_a_quarter_and_one_come_to_80_and_20(kernel: Kernel) -> None:
    parts = contention({"a": 0.25, "b": 1.0}, kernel)
    assert parts["a"] == pytest.approx(0.8, abs=0.03)


@every_kernel
def test_a_lone_share_gets_all_but_the_reserve(kernel: Kernel) -> None:
    work = Workload(jobs=tuple(job("a", i, submit_s=1.0 + i, duration_s=5000.0) for i in range(30)))
    first = job("a", 99, duration_s=100.0)
    done = replay(Workload(jobs=(first, *work.jobs)), weights(reservation=40), 10, Knobs(kernel))
    assert done.peak_vcpus == 6
    free = replay(work, weights(), 10, Knobs(kernel))
    assert free.peak_vcpus == 10


@every_kernel
def test_the_reserve_is_for_a_share_that_was_not_active(kernel: Kernel) -> None:
    old = [job("a", i, submit_s=float(i), duration_s=5000.0) for i in range(30)]
    new = job("b", 0, submit_s=100.0, vcpus=4)
    done = replay(Workload(jobs=(*old, new)), weights(reservation=40), 10, Knobs(kernel))
    (run,) = [one for one in done.runs if one.job.share == "b"]
    assert run.wait_s == 0


@every_kernel
def test_a_share_that_was_silent_goes_first_again(kernel: Kernel) -> None:
    """`a` used everything, then was silent for longer than the window; `b` has used a little since."""
    jobs = [job("a", 0, vcpus=4, duration_s=2000.0)]
    jobs += [job("b", 0, submit_s=5000.0, vcpus=4, duration_s=600.0)]
    jobs += [job("b", 1, submit_s=5100.0, vcpus=4), job("a", 1, submit_s=5200.0, vcpus=4)]
    done = replay(Workload(jobs=tuple(jobs)), weights(decay_s=1000), 4, Knobs(kernel))
    start = {run.job.id: run.starts_s[0] for run in done.runs}
    assert start["a1"] == 5600.0
    assert start["b1"] > start["a1"]


@every_kernel
def test_priority_orders_within_a_share_only(kernel: Kernel) -> None:
    jobs = [job("a", 0, vcpus=4, duration_s=1000.0), job("b", 0, submit_s=1.0, vcpus=4, duration_s=100.0)]
    jobs += [job("a", 1, submit_s=2.0, vcpus=4, priority=9999), job("b", 1, submit_s=3.0, vcpus=4)]
    jobs += [job("b", 2, submit_s=4.0, vcpus=4, priority=5)]
    done = replay(Workload(jobs=tuple(jobs)), weights(), 4, Knobs(kernel))
    order = [run.job.id for run in sorted(done.runs, key=lambda run: run.starts_s[0])]
    assert order == ["a0", "b2", "b0", "b1", "a1"]


some_jobs = st.lists(
    st.builds(
        lambda share, submit, duration, vcpus, nodes, priority, failed: {
            "share": share,
            "submit_s": submit,
            "duration_s": duration,
            "vcpus": vcpus,
            "nodes": nodes,
            "priority": priority,
            "failed_s": failed,
        },
        st.sampled_from(["a", "b", "c1", "c2"]),
        st.floats(0, 5000),
        st.floats(1, 3000),
        st.integers(1, 8),
        st.integers(1, 2),
        st.integers(0, 3),
        st.lists(st.floats(1, 500), max_size=2),
    ),
    min_size=1,
    max_size=25,
)


@given(
    fields=some_jobs,
    kernel=st.sampled_from(Kernel),
    reservation=st.sampled_from([0, 10, 50, 99]),
    backfill=st.booleans(),
)
def test_every_job_runs_once_and_never_more_than_there_is(
    fields: list[dict[str, object]], kernel: Kernel, reservation: int, backfill: bool
) -> None:
    work = Workload(jobs=tuple(SimulatedJob.model_validate(one | {"id": str(i)}) for i, one in enumerate(fields)))
    policy = FairSharePolicy(
        share_decay_s=900,
        compute_reservation=reservation,
        shares=(ShareWeight(share_identifier="a", weight=0.5), ShareWeight(share_identifier="c*", weight=3)),
    )
    done = replay(work, policy, 16, Knobs(kernel, backfill, group_scaling=True))
    changes = list[tuple[float, int]]()
    for run in done.runs:
        seconds = (*run.job.failed_s, run.job.duration_s)
        assert len(run.starts_s) == len(seconds)
        assert run.runnable_s == run.job.submit_s <= run.starts_s[0]
        assert run.end_s == run.starts_s[-1] + run.job.duration_s
        ends = [start + length for start, length in zip(run.starts_s, seconds, strict=True)]
        assert all(start >= end for end, start in zip(ends, run.starts_s[1:], strict=False))
        changes += [(start, run.job.size) for start in run.starts_s] + [(end, -run.job.size) for end in ends]
    used = peak = 0
    for _, change in sorted(changes, key=lambda change: (change[0], change[1])):
        used += change
        peak = max(peak, used)
    assert used == 0
    assert peak == done.peak_vcpus <= 16
    asked = sum(run.job.size * sum((*run.job.failed_s, run.job.duration_s)) for run in done.runs)
    assert sum(done.usage.values()) == pytest.approx(asked)


def test_a_job_waits_for_those_it_depends_on() -> None:
    work = Workload(jobs=(job("a", 0, failed_s=(30.0,)), job("a", 1, submit_s=10.0, depends_on=("a0",))))
    first, second = replay(work, weights(), 4).runs
    assert first.starts_s == (0.0, 30.0)
    assert second.runnable_s == second.starts_s[0] == first.end_s == 90.0


def test_a_blocked_head_stops_the_queue_unless_backfill_is_tried() -> None:
    jobs = (
        job("a", 0, vcpus=3),
        job("a", 1, submit_s=1.0, vcpus=4),
        job("b", 0, submit_s=0.5, vcpus=4),
        job("c", 0, submit_s=2.0),
    )
    strict, loose = (replay(Workload(jobs=jobs), weights(), 4, Knobs(backfill=flag)) for flag in (False, True))
    assert strict.runs[3].starts_s[0] > 60.0
    assert loose.runs[3].starts_s[0] == 2.0


def test_a_job_larger_than_the_fleet_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a0 asks for 32 vCPU \(4 x 8\)"):
        replay(Workload(jobs=(job("a", 0, vcpus=8, nodes=4),)), weights(), 16)


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        (({"id": "x"}, {"id": "x"}), "not unique"),
        (({"id": "x", "depends_on": ["y"]},), "which is not there"),
        (({"id": "x", "depends_on": ["y"], "submit_s": 0}, {"id": "y", "submit_s": 5}), "submitted after it"),
        (({"id": "x", "share": "a-b"},), "share"),
        (({"id": "x", "depends_on": [str(i) for i in range(21)]},), "20"),
        ((), "at least 1"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(jobs: tuple[dict[str, object], ...], text: str) -> None:
    base = {"share": "a", "submit_s": 0.0, "duration_s": 1.0, "vcpus": 1}
    with pytest.raises(ValueError, match=text):
        Workload.model_validate({"jobs": [base | one for one in jobs]})


def test_a_mix_is_the_same_for_the_same_seed_and_asks_for_its_load() -> None:
    mix = Mix(num_jobs=500, load=0.5, seed=3)
    assert generate(mix) == generate(mix)
    assert generate(mix) != generate(mix.model_copy(update={"seed": 4}))
    jobs = generate(mix).jobs
    span = max(one.submit_s for one in jobs)
    asked = sum(one.size * one.duration_s for one in jobs)
    assert asked / (span * mix.max_vcpus) == pytest.approx(0.5, rel=0.05)
    assert {one.share for one in jobs} == {"production", "backfill", *(f"experiment{i}" for i in range(4))}
