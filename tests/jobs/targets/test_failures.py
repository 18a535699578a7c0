"""Where the error of a failed job is taken from, whatever the target."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import JobRecord, SubmittedJob, outcome_of
from jobs.cycle.tables import NO_LOG, failure_lines
from jobs.targets.base import NO_OUTPUT, no_log, with_errors
from pipeline.core.errors import Preempted, TransientError
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import array, bad, good, tried, under_way
from tests.jobs.node.test_post_mortem import bundle

WORDS, SHOWN = "trnpipe train: DataError: shard 3 is damaged", "DataError: shard 3 is damaged"
TRAIN = bad("train", tried(75), tried(65))
LOG = "  log: trnjobs logs"


class Logs:
    """What the target tells, as long as it is asked."""

    def __init__(self, *lines: str, error: BaseException | None = None) -> None:
        self.lines, self.error, self.asked = lines, error, list[tuple[str, int, int]]()

    def __call__(self, task: JobRecord, attempt: int, node: int) -> Iterator[str]:
        self.asked.append((task.name, attempt, node))
        if self.error:
            raise self.error
        yield from self.lines


@pytest.fixture
def store(tmp_path: Path) -> CycleStore:
    return CycleStore(open_storage(str(tmp_path)), "c", lambda: 100.0)


def put(store: CycleStore, name: str, **fields: object) -> None:
    text = bundle(**{"own_exit_code": 65, **fields}).model_dump_json()
    store.storage.write_bytes(store.key(f"post-mortem/{name}.json"), text.encode())


def error_of(store: CycleStore, record: JobRecord, logs: Logs) -> tuple[str, int]:
    (found,) = with_errors(store, [record], logs, {"MY_TOKEN": "supersecret"})
    return found.attempts[-1].error, found.attempts[-1].error_node


def test_the_last_attempt_s_log_where_its_node_has_left_nothing(store: CycleStore) -> None:
    logs = Logs("reading with supersecret", WORDS, "  next: s3://user:pass@host/x supersecret")
    assert error_of(store, TRAIN, logs) == (f"{SHOWN}\n  next: s3://***@host/x ***", 0)
    assert logs.asked == [("train", 2, 0)]
    assert error_of(store, TRAIN, Logs()) == (NO_OUTPUT, 0)


@pytest.mark.parametrize("error", [no_log(TRAIN, 2, 0), TransientError("throttled"), OSError("gone")])
def test_a_log_that_is_gone_is_told(store: CycleStore, error: BaseException) -> None:
    found = with_errors(store, [TRAIN], Logs(error=error), {})
    lines = failure_lines(found, "file:///my w", "c")
    assert lines == ["train failed, attempt 2:", f"  {NO_LOG}", f"{LOG} train --workspace '/my w' --cycle c"]
    with pytest.raises(Preempted):
        with_errors(store, [TRAIN], Logs(error=Preempted("stopped")), {})


def test_the_node_whose_own_command_failed(store: CycleStore) -> None:
    """The others were told to stop by the main node; an earlier attempt and another round say nothing of this one."""
    put(store, "train-1-node0", log=("trnpipe train: DataError: of attempt 1",))
    put(store, "train-2-node0-round-2", log=("trnpipe train: DataError: of round 2",))
    other = {"own_exit_code": 75, "reason": "node 3 exited with 65", "log": ("trnpipe train: TransientError: x",)}
    put(store, "train-2-node0", **other)
    put(store, "train-2-node3", returncode=65, node=3, log=(WORDS,))
    logs = Logs("must not be read")
    assert (error_of(store, TRAIN, logs), logs.asked) == ((SHOWN, 3), [])
    lines = failure_lines(with_errors(store, [TRAIN], logs, {}), "s3://b/w", "c")
    assert lines[-1] == f"{LOG} train --workspace s3://b/w --cycle c --node 3"


def test_of_the_round_in_which_the_job_was_submitted(store: CycleStore) -> None:
    put(store, "train-2-node0", log=("trnpipe train: DataError: of round 1",))
    put(store, "train-2-node0-round-2", returncode=65, log=(WORDS,))
    for submission, job_id in ((1, "other"), (2, TRAIN.id)):
        store.save_submitted(submission, SubmittedJob(job="train", id=job_id, submitted_at=1.0))
    assert error_of(store, TRAIN, Logs()) == (SHOWN, 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"returncode": None, "reason": "ConfigError: 'x' cannot\n  next: y"}, "ConfigError: 'x' cannot\n  next: y"),
        ({"returncode": -9, "log": ("step 5",)}, "step 5\n(killed by SIGKILL)"),
        ({"returncode": -9, "out_of_memory_kills": 1}, "(killed by SIGKILL, out of memory)"),
        ({"returncode": 1}, NO_OUTPUT),
    ],
)
def test_what_ended_before_it_could_say_why(store: CycleStore, fields: dict[str, object], expected: str) -> None:
    put(store, "train-2-node0", **fields)
    assert error_of(store, TRAIN, Logs("no"))[0] == expected


def test_what_is_on_record_is_not_read_again(store: CycleStore) -> None:
    store.save_records(with_errors(store, [TRAIN], Logs(WORDS), {}))
    logs = Logs("another")
    assert (error_of(store, TRAIN, logs), logs.asked) == ((SHOWN, 0), [])
    later = bad("train", *TRAIN.attempts, tried(65))  # one more attempt has a log of its own
    assert error_of(store, later, logs) == ("another", 0)


def test_a_refusal_shows_the_checks_that_fail(store: CycleStore) -> None:
    refusal = "GateRefused: m is not promoted: ndcg@10 0.864, boosting 0.938: 0.074 worse"
    logs = Logs(f"trnpipe evaluate: {refusal}", "  expected: a better one")
    found = with_errors(store, [bad("evaluate", tried(80))], logs, {})
    assert failure_lines(found, "/w", "c")[:2] == ["evaluate refused the model:", f"  {refusal}"]
    closed = outcome_of(plan(job("evaluate")), found)
    assert closed is not None and closed.outcome == "refused"
    assert closed.reason == f"evaluate: exit code 80 (GateRefused): {refusal.partition(': ')[2]}"


def test_of_an_array_the_first_child_that_failed_and_none_of_jobs_that_did_not_fail_by_themselves(
    store: CycleStore,
) -> None:
    put(store, "embed-1-1-node0", returncode=65, log=(WORDS,))
    record = array("embed", "FAILED", good("embed:0"), bad("embed:1", tried(65)), bad("embed:2", tried(65)))
    found = with_errors(store, [record], Logs(), {})
    assert [child.attempts[-1].error for child in found[0].children] == ["", SHOWN, ""]
    assert failure_lines(found, "/w", "c")[-1] == f"{LOG} embed:1 --workspace /w --cycle c"
    others = [bad("d", tried(143), why="cancelled: by hand"), bad("e", tried(143), why="no longer needed: a failed")]
    records, logs = (good("a"), under_way("b", "RUNNING", tried(75)), bad("c"), *others), Logs("no")
    assert (with_errors(store, records, logs, {}), logs.asked) == (records, [])
    assert failure_lines(records, "/w", "c") == []
