"""The variables of a platform become the words of a place."""

import pytest

from jobs.node.environment import batch_variables
from pipeline.core.errors import ConfigError

GANG = {
    "AWS_BATCH_JOB_ID": "abc#2",
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}


def test_a_node_of_aws_batch() -> None:
    assert batch_variables(GANG) == {
        "TRNJOBS_JOB_ID": "abc",
        "TRNJOBS_ATTEMPT": "2",
        "TRNJOBS_NODES": "4",
        "TRNJOBS_NODE": "2",
        "TRNJOBS_MAIN": "10.0.0.7",
    }


def test_nodes_of_aws_batch_count_from_the_main_node() -> None:
    at = [GANG | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "3", "AWS_BATCH_JOB_NODE_INDEX": str(i)} for i in range(4)]
    assert [batch_variables(env)["TRNJOBS_NODE"] for env in at] == ["1", "2", "3", "0"]


def test_a_child_of_an_array_and_no_job_at_all() -> None:
    child = {"AWS_BATCH_JOB_ID": "abc:7", "AWS_BATCH_JOB_ARRAY_INDEX": "7"}
    assert batch_variables(child) == {"TRNJOBS_JOB_ID": "abc:7", "TRNJOBS_INDEX": "7"}
    assert batch_variables({"HOME": "/root"}) == {}


@pytest.mark.parametrize("change", [{"AWS_BATCH_JOB_NODE_INDEX": "x"}, {"AWS_BATCH_JOB_NUM_NODES": "0"}])
def test_what_does_not_fit_together_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="AWS_BATCH_JOB"):
        batch_variables(GANG | change)
