"""What a node is told: the words of a place, and the settings of its own job."""

import sys
from pathlib import Path

import pytest

from jobs.cycle.job_states import Leaf
from jobs.plan.spec import JobSpec
from jobs.targets.local.nodes import group_port, local_command, node_environment
from pipeline.core.interpreter import OWN_MODULE
from pipeline.parallel.world import torchrun_arguments
from tests.jobs.cycle.cases import job, plan

COMMON = {"TRNJOBS_JOB": "a", "TRNJOBS_JOB_ID": "id", "TRNJOBS_ATTEMPT": "2"}


def environment(spec: JobSpec, *, index: int | None = None, node: int = 0) -> dict[str, str]:
    leaf = Leaf(spec, index)
    leaf_id = "id" if index is None else f"id:{index}"
    return node_environment({}, plan(spec), leaf, leaf_id, 2, node, "10.0.0.7")


def words(found: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if name.startswith("TRNJOBS_")}


def test_a_child_of_an_array() -> None:
    found = words(environment(job("a", array_size=3), index=1))
    assert found == COMMON | {"TRNJOBS_JOB_ID": "id:1", "TRNJOBS_INDEX": "1"}


def test_of_a_gang_all_but_the_main_node_know_its_address() -> None:
    gang = COMMON | {"TRNJOBS_NODES": "2"}
    assert words(environment(job("a", num_nodes=2))) == gang | {"TRNJOBS_NODE": "0"}
    found = words(environment(job("a", num_nodes=2), node=1))
    assert found == gang | {"TRNJOBS_NODE": "1", "TRNJOBS_MAIN": "10.0.0.7"}


def test_all_nodes_of_an_attempt_meet_at_one_place() -> None:
    gang = job("g", num_nodes=2)
    found = [torchrun_arguments(1, environment(gang, node=node), own=lambda: "10.0.0.7")[-2:] for node in range(2)]
    assert found[0] == found[1] == ["--master-addr=10.0.0.7", f"--master-port={group_port('id', 2)}"]


def test_a_job_sees_its_own_settings_and_nothing_of_what_is_around_the_engine() -> None:
    around = {
        "HOME": "/home/x",
        "PATH": "/usr/bin",
        "AWS_REGION": "us-west-2",
        "TRNPIPE_TRAIN__MAX_STEPS": "1",
        "TRNJOBS_JOB": "driver",
        "AWS_BATCH_JOB_NODE_INDEX": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "1",
    }
    spec = job("a", environment={"TRNPIPE_BACKEND": "cpu", "HOME": "/root"})
    found = node_environment(around, plan(spec), Leaf(spec), "id", 1, 0, "10.0.0.7")
    assert {name: found.get(name) for name in around} == {
        **dict.fromkeys(around, None),
        "HOME": "/root",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin",
        "AWS_REGION": "us-west-2",
        "TRNJOBS_JOB": "a",
    }
    assert found["TRNPIPE_BACKEND"] == "cpu"
    assert (found["TRNPIPE_CYCLE"], found["TRNPIPE_WORKSPACE"]) == ("2026-11-20", "s3://bucket/relevance")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("trnjobs-entry", "--", "trnpipe", "train"), [*OWN_MODULE, "jobs.node", "--", "trnpipe", "train"]),
        (("trnpipe", "train"), [*OWN_MODULE, "pipeline", "train"]),
        (("sh", "-c", "trnpipe"), ["sh", "-c", "trnpipe"]),
    ],
)
def test_our_commands_run_with_this_interpreter(words: tuple[str, ...], expected: list[str]) -> None:
    assert local_command(words) == expected
