"""Who we are, in the words of every platform."""

import pytest

from jobs.node.environment import Place, Timing, batch_variables
from pipeline.core.errors import ConfigError
from pipeline.parallel.world import MASTER_PORT

MAIN = {
    "TRNPIPE_WORKSPACE": "s3://bucket/relevance",
    "TRNPIPE_CYCLE": "2026-11-20",
    "TRNJOBS_JOB": "train",
    "TRNJOBS_JOB_ID": "abc",
    "TRNJOBS_ATTEMPT": "2",
    "TRNJOBS_NODES": "4",
    "TRNJOBS_NODE": "0",
}
CHILD = MAIN | {"TRNJOBS_NODE": "3", "TRNJOBS_MAIN": "10.0.0.7"}


def test_the_main_node_has_no_main_address() -> None:
    main, child = Place.from_env(MAIN), Place.from_env(CHILD)
    assert (main.node, main.main_address, main.job_id, main.port) == (0, "", "abc", MASTER_PORT + 1)
    assert (child.node, child.main_address, child.job_id) == (3, "10.0.0.7", "abc")
    assert main.token == child.token


def test_tokens_differ_between_jobs_and_between_tries() -> None:
    others = [MAIN | {"TRNJOBS_JOB_ID": "abd"}, MAIN | {"TRNJOBS_ATTEMPT": "3"}]
    assert len({Place.from_env(env).token for env in [MAIN, *others]}) == 3


def test_an_array_child_is_named_by_its_index() -> None:
    place = Place.from_env({"TRNJOBS_JOB": "embed", "TRNJOBS_JOB_ID": "abc:7", "TRNJOBS_INDEX": "7"})
    assert (place.job, place.num_nodes) == ("embed-7", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"TRNJOBS_NODE": "1"},
        {"TRNJOBS_NODE": "x"},
        {"TRNJOBS_ATTEMPT": "one"},
        {"MASTER_PORT": "-1"},
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Place.from_env(MAIN | change)


def test_times_come_from_the_environment() -> None:
    assert Timing.from_env({}) == Timing()
    assert Timing.from_env({"TRNJOBS_LOST_AFTER_S": "2.5"}) == Timing(lost_after_s=2.5)
    for bad in ("soon", "0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="TRNJOBS_GRACE_S"):
            Timing.from_env({"TRNJOBS_GRACE_S": bad})


BATCH_NODE = {
    "AWS_BATCH_JOB_ID": "abc#2",
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}


def test_a_node_of_aws_batch() -> None:
    assert batch_variables(BATCH_NODE) == {
        "TRNJOBS_JOB_ID": "abc",
        "TRNJOBS_ATTEMPT": "2",
        "TRNJOBS_NODES": "4",
        "TRNJOBS_NODE": "2",
        "TRNJOBS_MAIN": "10.0.0.7",
    }


def test_nodes_of_aws_batch_count_from_the_main_node() -> None:
    at = [BATCH_NODE | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "3", "AWS_BATCH_JOB_NODE_INDEX": str(i)} for i in range(4)]
    assert [batch_variables(env)["TRNJOBS_NODE"] for env in at] == ["1", "2", "3", "0"]


def test_a_child_of_an_array_and_no_job_at_all() -> None:
    child = {"AWS_BATCH_JOB_ID": "abc:7", "AWS_BATCH_JOB_ARRAY_INDEX": "7"}
    assert batch_variables(child) == {"TRNJOBS_JOB_ID": "abc:7", "TRNJOBS_INDEX": "7"}
    assert batch_variables({"HOME": "/root"}) == {}


@pytest.mark.parametrize("change", [{"AWS_BATCH_JOB_NODE_INDEX": "x"}, {"AWS_BATCH_JOB_NUM_NODES": "0"}])
def test_variables_of_batch_that_do_not_fit_together_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="AWS_BATCH_JOB"):
        batch_variables(BATCH_NODE | change)
