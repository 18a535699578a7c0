"""The engine over nodes that are not there: order, node groups, retries, cancelling, and its own death at any call."""

import errno
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.cycle.job_states import (
    EXITED,
    HOST_TERMINATED,
    INTERRUPTED,
    TASK_NOT_STARTED,
    TIMED_OUT,
    AttemptEnd,
    JobState,
    Task,
)
from jobs.plan.spec import Dependency, JobSpec, Retry
from jobs.targets.local import target
from jobs.targets.local.nodes import NodeEnd
from jobs.targets.local.target import LocalEngine, Slots, attempt_end, check_fits, startable_jobs
from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.proc.children import MARGIN_S
from tests.jobs.cycle.cases import job
from tests.jobs.targets.local.cases import GRACE_S, Died, Fate, World, of_no_use, world

SUCCEEDED, FAILED = JobState.SUCCEEDED, JobState.FAILED
EXIT_75, LOST = Fate(end=NodeEnd(exit_code=75)), Fate(end=NodeEnd(lost=True))


def ran(jobs: list[JobSpec], table: Mapping[tuple[str, int, int], Fate]) -> World:
    made = world(jobs, lambda name, attempt, node: table.get((name, attempt, node), Fate()))
    made.engine().run()
    return made


OOM = "OutOfMemoryError: Container killed due to memory usage"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (NodeEnd(exit_code=0), AttemptEnd(0, EXITED)),
        (NodeEnd(exit_code=75), AttemptEnd(75, EXITED)),
        (NodeEnd(exit_code=137, out_of_memory=True), AttemptEnd(137, EXITED, OOM)),
        (NodeEnd(exit_code=75, out_of_memory=True), AttemptEnd(75, EXITED)),  # another process was killed
        (NodeEnd(exit_code=137), AttemptEnd(137, HOST_TERMINATED, "Killed from outside")),
        (NodeEnd(exit_code=137, stopped_by="SIGTERM"), AttemptEnd(137, EXITED)),
        (NodeEnd(exit_code=137, stopped_by="timeout"), AttemptEnd(137, TIMED_OUT)),
        (NodeEnd(exit_code=0, stopped_by="timeout"), AttemptEnd(0, TIMED_OUT)),
        (NodeEnd(exit_code=143, stopped_by="SIGINT"), AttemptEnd(143, INTERRUPTED)),
        (NodeEnd(exit_code=0, stopped_by="SIGINT"), AttemptEnd(0, EXITED)),  # it was ready just then
        (NodeEnd(lost=True), AttemptEnd(None, HOST_TERMINATED)),
        (NodeEnd(error="x: gone"), AttemptEnd(None, TASK_NOT_STARTED, "CannotStartContainerError: x: gone")),
    ],
)
def test_the_end_of_an_attempt_in_the_words_of_batch(end: NodeEnd, expected: AttemptEnd) -> None:
    assert attempt_end(end) == expected


@pytest.mark.parametrize(
    ("end", "cancelled", "interrupted"),
    [
        (NodeEnd(exit_code=0, stopped_by="SIGTERM"), "why", EXITED),
        (NodeEnd(exit_code=75), "why", EXITED),
        (NodeEnd(lost=True), "why", HOST_TERMINATED),
        (NodeEnd(exit_code=0), EXITED, EXITED),  # it had ended before
        (NodeEnd(error="stopped before it began"), "why", INTERRUPTED),
    ],
)
def test_the_end_of_one_that_was_cancelled_or_interrupted(end: NodeEnd, cancelled: str, interrupted: str) -> None:
    assert attempt_end(end, cancelled="why").status_reason == cancelled
    assert attempt_end(end, interrupted=True).status_reason == interrupted


MACHINE = Slots(vcpus=4, memory_mib=16_384, groups=1)  # jobs of the cases take 2 vCPU and 4,096 MiB a node


@pytest.mark.parametrize(
    ("queue", "active", "expected"),
    [
        ("abc", "", "ab"),
        ("abc", "d", "a"),
        ("abc", "de", ""),
        ("Gab", "d", ""),  # nobody overtakes a node group that waits for room
        ("aGb", "", "a"),
        ("Gab", "", "G"),
        ("HI", "", "H"),  # of one node each: one group at a time
    ],
)
def test_first_in_first_out(queue: str, active: str, expected: str) -> None:
    nodes = {"G": 2, "H": 1, "I": 1}
    tasks = {name: Task(job(name, num_nodes=nodes.get(name, 0))) for name in "abcdeGHI"}
    found = startable_jobs([tasks[name] for name in queue], [tasks[name] for name in active], MACHINE)
    assert "".join(task.name for task in found) == expected


def test_what_can_never_run_is_refused_by_name() -> None:
    check_fits([job("a"), job("g", num_nodes=2), job("e", array_size=100)], MACHINE)
    with pytest.raises(ConfigError, match=r"2 jobs need more(.|\n)*g: 6 vCPU, 12,288 MiB, 1 node group\n(.|\n)*h: "):
        check_fits([job("a"), job("g", num_nodes=3), job("h", num_nodes=9)], MACHINE)


def test_the_timeout_of_a_gang_is_one_for_all_its_nodes() -> None:
    made = ran([job("g", num_nodes=2, timeout_s=100)], {})
    main_s, child_s = made.nodes.timeouts["g", 1, 0], made.nodes.timeouts["g", 1, 1]
    assert main_s == 100
    assert 99 < child_s < 100  # the main node had begun before


PATIENCE_S = GRACE_S + MARGIN_S


def test_a_node_whose_keeper_hangs_is_killed_after_the_main_node_has_ended() -> None:
    table = {("g", 1, 0): EXIT_75, ("g", 1, 1): Fate(hangs="running"), ("g", 1, 2): Fate(hangs="starting")}
    made = ran([job("g", num_nodes=3)], table)
    assert made.nodes.kills == [(("g", 1, 1), "SIGTERM"), (("g", 1, 2), "SIGTERM")]
    assert [one.exit_code for one in made.record("g").attempts] == [75, 0]
    assert made.record("g").attempts[0].stopped_at == pytest.approx(PATIENCE_S, abs=2.0)


@pytest.mark.parametrize("num_nodes", [0, 2])
def test_the_engine_enforces_a_timeout_that_the_keeper_does_not(num_nodes: int) -> None:
    hung = Fate(hangs="running")
    made = ran([job("g", num_nodes=num_nodes, timeout_s=100)], {("g", 1, 0): hung, ("g", 1, 1): hung})
    record = made.record("g")
    assert (record.state, record.status_reason) == (FAILED, "Job attempt duration exceeded timeout")
    assert len(record.attempts) == 1
    assert {by for _, by in made.nodes.kills} == {"timeout"}
    assert made.nodes.now == pytest.approx(100 + PATIENCE_S, abs=2.0)


def run_a_second(engine: LocalEngine, made: World) -> None:
    for _ in range(10):
        engine.tick()
        made.nodes.pause(0.1)


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
@pytest.mark.parametrize("num_nodes", [0, 2])
def test_a_wall_clock_that_jumps_ends_no_job_before_its_limit(num_nodes: int, jump_s: float) -> None:
    made = world([job("g", num_nodes=num_nodes, timeout_s=3600)], lambda *_: Fate(after_s=60.0))
    running = made.engine()
    run_a_second(running, made)
    made.ahead_s = jump_s
    running.run()
    assert (made.ends(), made.nodes.kills) == ({"g": SUCCEEDED}, [])
    assert len(made.record("g").attempts) == 1


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_the_limit_holds_though_the_wall_clock_jumps_and_the_engine_dies(jump_s: float) -> None:
    """The next engine learns from the wall clock how long the job has run, and measures from there."""
    made = world([job("a", timeout_s=100)], lambda *_: Fate(hangs="running"))
    run_a_second(made.engine(), made)
    made.nodes.pause(80.0)
    second = made.engine()
    run_a_second(second, made)
    made.ahead_s = jump_s
    second.run()
    assert made.record("a").status_reason == "Job attempt duration exceeded timeout"
    assert made.nodes.now == pytest.approx(100 + PATIENCE_S, abs=2.0)


def test_a_keeper_that_never_begins_is_a_task_that_did_not_start() -> None:
    made = ran([job("a")], {("a", 1, 0): Fate(hangs="starting")})
    assert made.ends() == {"a": SUCCEEDED}
    first, _ = made.record("a").attempts
    assert first.status_reason == "Task failed to start"
    assert made.nodes.now == pytest.approx(target.START_PATIENCE_S, abs=5.0)


BY_HAND = "cancelled: by hand"


@pytest.mark.parametrize("active", [True, False])
def test_of_a_cancelled_cycle_every_job_says_so_and_none_that_a_dependency_failed(active: bool) -> None:
    """Whatever it waited for is cancelled with it, and has not failed."""
    made = world([job("a"), job("b", "a"), job("c", "b"), job("e", "b", array_size=2)], lambda *_: Fate(after_s=1e3))
    running = made.engine()
    if active:
        run_a_second(running, made)
    made.files.asked.update(dict.fromkeys("abce", BY_HAND))
    running.run()
    ends = {record.name: (record.state, record.status_reason) for record in made.files.state(1)}
    assert ends == dict.fromkeys(("a", "b", "c", "e:0", "e:1"), (JobState.CANCELLED, BY_HAND))
    assert made.nodes.starts == ([("a", 1, 0)] if active else [])
    assert made.nodes.alive() == set()


def test_the_engine_shows_now_and_then_that_it_lives_and_when_it_ends() -> None:
    """Whoever finds its lock free tells from that how long nobody has run the jobs."""
    made = world([job("a")], lambda *_: Fate(after_s=31.0))
    made.engine().run()
    assert 7 <= len(made.files.touches) <= 8  # every 5 s, and at the end


def test_cancelled_while_the_engine_is_interrupted_it_is_cancelled_for_good() -> None:
    made = world([job("a"), job("b", "a")], lambda *_: Fate(after_s=1e3))
    stop = StopSignal()
    running = made.engine(stop)
    run_a_second(running, made)
    stop.set("SIGINT")
    made.files.asked.update(dict.fromkeys("ab", BY_HAND))
    with pytest.raises(Preempted):
        running.run()
    assert made.nodes.stops == [(("a", 1, 0), "SIGTERM")]
    assert {one.status_reason for one in made.files.state(1)} == {BY_HAND}


@pytest.mark.parametrize("vcpus", [6, 2])
def test_what_feeds_only_a_job_that_cannot_run_is_ended(vcpus: int) -> None:
    """Running, or still in the queue; a job that others need goes on, and so does what no other waits for."""
    jobs = [job("prepare"), job("health"), job("step"), job("compile", "prepare", "health")]
    fates = {"prepare": Fate(end=NodeEnd(exit_code=65)), "health": Fate(after_s=1e3)}
    made = world(jobs, lambda name, *_: fates.get(name, Fate(after_s=5.0)), vcpus=vcpus)
    made.engine().run()
    assert made.nodes.now < 20.0
    assert {one.name: (one.state, one.status_reason) for one in made.files.state(1)} == {
        "prepare": (FAILED, "Essential container in task exited"),
        "health": (JobState.CANCELLED, "no longer needed: prepare failed"),
        "step": (SUCCEEDED, "Essential container in task exited"),
        "compile": (FAILED, "not run: prepare failed"),
    }
    assert made.nodes.stops == ([(("health", 1, 0), "SIGTERM")] if vcpus == 6 else [])


@pytest.mark.parametrize("full_until", [7.0, 1e9])
def test_a_full_disk_starts_nothing_until_there_is_room_and_is_given_up_on(full_until: float) -> None:
    made = world([job("a"), job("b", "a")])

    def before_save() -> None:
        if made.nodes.now < full_until:
            raise OSError(errno.ENOSPC, "No space left on device")

    object.__setattr__(made.files, "before_save", before_save)
    if full_until > 1e6:
        with pytest.raises(TransientError, match="no space left"):
            made.engine().run()
        assert made.nodes.now == pytest.approx(target.DISK_PATIENCE_S, abs=1.0)
        assert made.nodes.starts == []
        return
    made.engine().run()
    assert made.ends() == {"a": SUCCEEDED, "b": SUCCEEDED}
    assert sum("no job is started" in line for line in made.said) == 1
    assert min(node.begins_at for node in made.nodes.nodes.values()) >= full_until


ENDS = (
    NodeEnd(exit_code=0),
    NodeEnd(exit_code=0),
    NodeEnd(exit_code=75),
    NodeEnd(exit_code=65),
    NodeEnd(lost=True),
    NodeEnd(error="x: gone"),
    NodeEnd(exit_code=143, stopped_by="timeout"),
)
AGAIN = (NodeEnd(exit_code=75), NodeEnd(lost=True), NodeEnd(error="x: gone"))


@st.composite
def dags(draw: st.DrawFn, most_preemptions: int = 0) -> list[JobSpec]:
    """Jobs, gangs and arrays; each depends on some of those before it."""
    made: list[JobSpec] = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["job", "gang", "array"]))
        size = draw(st.integers(2, 3)) if kind == "array" else 0
        on = [Dependency(job=one.name) for one in made if draw(st.integers(0, 2)) == 0]
        nodes = draw(st.integers(1, 2)) if kind == "gang" else 0
        attempts = draw(st.integers(1, 3))
        retry = Retry.of(attempts, draw(st.integers(0, most_preemptions)))
        made.append(job(f"j{number}", array_size=size, num_nodes=nodes, depends_on=tuple(on), retry=retry))
    return made


def expected_ends(made: World, outcome: Mapping[tuple[str, int], NodeEnd]) -> dict[str, JobState]:
    """What must become of every leaf, whatever the order, by the words of the documentation."""
    good: set[str] = set()
    ends = {}
    for name, task in made.nodes.tasks.items():
        ready = all(_all_good(made, one, good) for one in task.waits_for())
        ends[name] = SUCCEEDED if ready and _succeeds(task.spec, name, outcome) else FAILED
        good |= {name} if ends[name] is SUCCEEDED else set()
    return ends


def _all_good(made: World, name: str, good: set[str]) -> bool:
    return all(task.name in good for task in made.nodes.tasks.values() if name in (task.name, task.spec.name))


def _succeeds(spec: JobSpec, name: str, outcome: Mapping[tuple[str, int], NodeEnd]) -> bool:
    failed = preempted = 0
    while failed + max(0, preempted - spec.retry.preemptions) < spec.retry.attempts:
        end = outcome.get((name, failed + preempted + 1), NodeEnd(exit_code=0))
        if end not in AGAIN:
            return end.exit_code == 0
        failed, preempted = failed + (not end.lost), preempted + end.lost
    return False


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_dag_with_any_outcomes_ends_as_it_must_though_the_engine_dies_at_any_call(data: st.DataObject) -> None:
    """FakeNodes asserts at every start: dependencies have succeeded, no second attempt, nothing beyond the machine."""
    jobs = data.draw(dags(most_preemptions=2))
    outcome: dict[tuple[str, int], NodeEnd] = {}
    seconds: dict[tuple[str, int, int], float] = {}

    def fate(name: str, attempt: int, node: int) -> Fate:
        key = (name, attempt)
        if node == 0 and key not in outcome:
            outcome[key] = data.draw(st.sampled_from(ENDS), label=f"{key}")
        after_s = seconds.setdefault((*key, node), data.draw(st.sampled_from([0.0, 0.2, 3.0])))
        if node:  # the end of which changes nothing, however it comes
            return Fate(after_s, NodeEnd(exit_code=1), data.draw(st.sampled_from([*[""] * 7, "running"])))
        return Fate(after_s, outcome[key])

    made = world(jobs, fate, vcpus=data.draw(st.integers(4, 8)))
    lives = iter(data.draw(st.lists(st.integers(0, 15), max_size=6), label="calls before each death"))
    left = [next(lives, None)]

    def before_call() -> None:
        if left[0] is not None:
            if left[0] == 0:
                left[0] = next(lives, None)
                raise Died
            left[0] -= 1

    made.nodes.before_call = before_call
    object.__setattr__(made.files, "before_save", before_call)
    while True:
        try:
            made.engine().run()
            break
        except Died:
            made.nodes.pause(data.draw(st.sampled_from([0.0, 1.0])))
    expected, ends = expected_ends(made, outcome), made.ends()
    ended = {name for name, state in ends.items() if state is JobState.CANCELLED}
    assert ended <= of_no_use(made.nodes.tasks.values(), expected)
    assert {name: state for name, state in ends.items() if name not in ended} == {
        name: state for name, state in expected.items() if name not in ended
    }
    assert made.nodes.alive() == set()
    assert len(made.nodes.starts) == len(set(made.nodes.starts))
    for record in made.files.state(1):
        tries = {key[1] for key in made.nodes.nodes if key[0] == record.name}
        assert tries == set(range(1, len(record.attempts) + 1))
