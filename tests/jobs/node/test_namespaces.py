"""A gang whose nodes have a network each, as tasks of Amazon ECS have."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.node.entries import PATIENT, clean_env, job_env
from tests.parallel.namespaces import MAIN_ADDRESS, ecs_tasks

PRINT = "import os; print(os.environ['CCOM_SOCKET_IFNAME'], os.environ['GLOO_SOCKET_IFNAME'], flush=True)"


@pytest.mark.fault
def test_nodes_meet_at_the_address_that_batch_tells_the_others(tmp_path: Path) -> None:
    """The main node has no word for its own address; the link to the agent of ECS comes first in its list."""
    with ecs_tasks() as tasks:
        nodes = []
        for node, into in enumerate(tasks):
            env = (
                clean_env() | PATIENT | job_env(tmp_path, AWS_BATCH_JOB_ID=f"job-1#{node}", AWS_BATCH_JOB_NUM_NODES="2")
            )
            env |= {"AWS_BATCH_JOB_NODE_INDEX": str(node), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
            if node:
                env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = MAIN_ADDRESS
            words = [*into, sys.executable, "-m", "jobs.node", "--", sys.executable, "-c", PRINT]
            nodes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        told = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert [out for out, _ in told] == ["eth0 eth0\n", "eth0 eth0\n"]
