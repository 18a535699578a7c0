"""Training jobs of SageMaker as processes: every start has a name of its own, the same on all its nodes, and an end."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs.node.environment import Start, count_start
from pipeline.context import attempt_name
from pipeline.core.errors import TransientError
from pipeline.io.storage import open_storage
from tests.jobs.node.entries import entry, ml_root, python
from tests.jobs.targets.faults import Faults, Killed, faulty
from tests.kit.ports import free_port

HOSTS = ["127.0.0.1", "127.0.0.2"]
NAME = "relevance-train-r1a2-0badcafe"
COUNTED = {"TRNJOBS_STARTS": "train-r1", "TRNPIPE_CYCLE": "2026-11-20", "TRNJOBS_JOB": "train"}
SAY = "import os; print(os.environ['TRNJOBS_JOB_ID'], os.environ['TRNJOBS_ATTEMPT'], flush=True)"


def counted(folder: Path, job_id: str, faults: Faults | None = None) -> Start:
    storage = faulty(open_storage(str(folder)), faults or Faults())
    return count_start(storage, "c", {"TRNJOBS_STARTS": "train-r1", "TRNJOBS_JOB_ID": job_id})


def test_each_id_is_a_try_and_each_start_of_it_has_a_name(tmp_path: Path) -> None:
    made = [counted(tmp_path, name) for name in ("a", "a", "b", "b", "b", "c")]
    expected = [("a", 1), ("a-start2", 1), ("b", 2), ("b-start2", 2), ("b-start3", 2), ("c", 3)]
    assert [(start.job_id, start.attempt) for start in made] == expected
    assert len({attempt_name(start.variables) for start in made}) == len(made)


def test_no_two_starts_share_a_name_though_they_count_at_once_or_die_of_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = [start.job_id for start in pool.map(lambda _: counted(tmp_path, "a"), range(16))]
    for calls in (1, 2, 17, 33, 60):
        try:
            names.append(counted(tmp_path, "a", Faults(kill_after=calls)).job_id)
        except Killed:
            names.append(counted(tmp_path, "a").job_id)
    assert len(set(names)) == len(names) == 21


def run(folder: Path, code: str, env: dict[str, str]) -> tuple[list[int | None], list[str]]:
    """Run two nodes, the main one at a loopback address, to their end; return exit codes and outputs."""
    port = {"MASTER_PORT": str(free_port())}
    nodes = [entry(*python(code), env=ml_root(folder / own, own, HOSTS, "lo") | port | env) for own in HOSTS]
    said = [node.finish()[0] for node in nodes]
    return [node.returncode for node in nodes], said


@pytest.mark.fault
@pytest.mark.parametrize("failing", [0, 1])
def test_both_nodes_of_a_group_leave_sagemaker_the_same_line(tmp_path: Path, failing: int) -> None:
    code = f"import os, sys, time; sys.exit(65) if os.environ['TRNJOBS_NODE'] == '{failing}' else time.sleep(100)"
    (main, _), _ = run(tmp_path, code, {})
    (line,) = {(tmp_path / own / "output" / "failure").read_text() for own in HOSTS}
    assert (main, line.startswith("exit 65 DataError")) == (65, True)


@pytest.mark.fault
@pytest.mark.parametrize("attempt", ["", "2"])
def test_a_group_on_spot_capacity_meets_nothing_of_its_first_start(tmp_path: Path, attempt: str) -> None:
    """Twice the same training job; the nodes of a start agree on its name, which is no other's."""
    env = COUNTED | {"TRNPIPE_WORKSPACE": str(tmp_path / "w")} | ({"TRNJOBS_ATTEMPT": attempt} if attempt else {})
    for start, name in (("first", NAME), ("second", f"{NAME}-start2")):
        assert run(tmp_path / start, SAY, env) == ([0, 0], [f"{name} {attempt or 1}\n"] * 2)


@pytest.mark.fault
def test_a_start_that_cannot_be_counted_ends_all_nodes_as_transient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Start:
        raise TransientError("the workspace does not answer")

    monkeypatch.setattr("jobs.node.run.count_start", refuse)  # the entries are forks of this process
    assert run(tmp_path, SAY, COUNTED | {"TRNPIPE_WORKSPACE": str(tmp_path / "w")}) == ([75, 75], ["", ""])
