"""Who a node is, in the words of every platform, and what it leaves SageMaker when it fails."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.node import environment
from jobs.node.environment import (
    MAX_FAILURE_BYTES,
    NodeIdentity,
    Timing,
    batch_variables,
    sagemaker_variables,
    write_failure,
)
from pipeline.core.errors import ConfigError, TransientError
from pipeline.parallel.world import MASTER_PORT
from tests.jobs.node.entries import ml_root

MAIN = {
    "TRNPIPE_WORKSPACE": "s3://bucket/relevance",
    "TRNPIPE_CYCLE": "2026-11-20",
    "TRNJOBS_JOB": "train",
    "TRNJOBS_JOB_ID": "abc",
    "TRNJOBS_ATTEMPT": "2",
    "TRNJOBS_NODES": "4",
    "TRNJOBS_NODE": "0",
}


def test_the_main_node_has_no_main_address_and_tokens_are_of_one_try() -> None:
    main, child = (
        NodeIdentity.from_env(MAIN),
        NodeIdentity.from_env(MAIN | {"TRNJOBS_NODE": "3", "TRNJOBS_MAIN": "10.0.0.7"}),
    )
    assert (main.node, main.main_address, main.job_id, main.port) == (0, "", "abc", MASTER_PORT + 1)
    assert (child.node, child.main_address, child.job_id) == (3, "10.0.0.7", "abc")
    others = [NodeIdentity.from_env(MAIN | {name: "3"}).token for name in ("TRNJOBS_JOB_ID", "TRNJOBS_ATTEMPT")]
    assert len({main.token, child.token, *others}) == 3


def test_an_array_child_is_named_by_its_index() -> None:
    place = NodeIdentity.from_env({"TRNJOBS_JOB": "embed", "TRNJOBS_JOB_ID": "abc:7", "TRNJOBS_INDEX": "7"})
    assert (place.job, place.num_nodes) == ("embed-7", 1)


@pytest.mark.parametrize(
    "change", [{"TRNJOBS_NODE": "1"}, {"TRNJOBS_NODE": "x"}, {"TRNJOBS_ATTEMPT": "one"}, {"MASTER_PORT": "-1"}]
)
def test_what_does_not_fit_together_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        NodeIdentity.from_env(MAIN | change)


def test_times_come_from_the_environment() -> None:
    assert Timing.from_env({"TRNJOBS_LOST_AFTER_S": "2.5"}) == Timing(lost_after_s=2.5)
    for bad in ("soon", "0", "nan", "inf"):
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
PLACE = {"TRNJOBS_JOB_ID": "abc", "TRNJOBS_ATTEMPT": "2", "TRNJOBS_NODES": "4", "TRNJOBS_MAIN": "10.0.0.7"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (BATCH_NODE, PLACE | {"TRNJOBS_NODE": "2"}),
        (BATCH_NODE | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "3"}, PLACE | {"TRNJOBS_NODE": "3"}),
        (BATCH_NODE | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "2"}, PLACE | {"TRNJOBS_NODE": "0"}),
        (
            {"AWS_BATCH_JOB_ID": "abc:7", "AWS_BATCH_JOB_ARRAY_INDEX": "7"},
            {"TRNJOBS_JOB_ID": "abc:7", "TRNJOBS_INDEX": "7"},
        ),
        ({"HOME": "/root"}, {}),
    ],
)
def test_nodes_and_children_of_aws_batch(env: dict[str, str], expected: dict[str, str]) -> None:
    assert batch_variables(env) == expected


@pytest.mark.parametrize("change", [{"AWS_BATCH_JOB_NODE_INDEX": "x"}, {"AWS_BATCH_JOB_NUM_NODES": "0"}])
def test_variables_of_batch_that_do_not_fit_together_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="AWS_BATCH_JOB"):
        batch_variables(BATCH_NODE | change)


# SageMaker.


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Names that resolve after `after_s`; nobody really waits."""
    made = SimpleNamespace(now=0.0, after_s=0.0, asked=[])

    def resolve(host: str) -> str:
        made.asked.append(host)
        if made.now < made.after_s:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "10.0.0.7"

    def sleep(seconds: float) -> None:
        made.now += seconds

    monkeypatch.setattr(environment, "socket", SimpleNamespace(gethostbyname=resolve))
    monkeypatch.setattr(environment, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: made.now))
    return made


def test_of_twelve_hosts_each_gets_its_own_rank_in_the_order_of_names(tmp_path: Path, late: SimpleNamespace) -> None:
    hosts = [f"algo-{number}" for number in range(1, 13)]
    ranks = {}
    for own in hosts:
        words = sagemaker_variables(ml_root(tmp_path / own, own, hosts), gather_s=900.0)
        ranks[own] = words.pop("TRNJOBS_NODE")
        interface = dict.fromkeys(("CCOM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "eth0")
        address = dict.fromkeys(("TRNJOBS_MAIN", "MASTER_ADDR"), "10.0.0.7")
        assert words == {
            "TRNJOBS_JOB_ID": "relevance-train-r1a2-0badcafe",
            "TRNJOBS_NODES": "12",
            **address,
            **interface,
        }
    assert set(late.asked) == {"algo-1"}
    assert [host for host, _ in sorted(ranks.items(), key=lambda one: int(one[1]))] == sorted(hosts)


def test_a_name_may_resolve_late(tmp_path: Path, late: SimpleNamespace) -> None:
    env = ml_root(tmp_path, "algo-2", ["algo-1", "algo-2"])
    late.after_s = 40.0
    with pytest.raises(TransientError, match="algo-1 has not resolved within 20 s"):
        sagemaker_variables(env, gather_s=20.0)
    assert sagemaker_variables(env, gather_s=900.0)["TRNJOBS_MAIN"] == "10.0.0.7"


def test_a_single_host_is_no_group_and_another_machine_no_training_job(tmp_path: Path) -> None:
    words = sagemaker_variables(ml_root(tmp_path, "algo-1", ["algo-1"]), gather_s=1.0)
    assert words == {"TRNJOBS_JOB_ID": "relevance-train-r1a2-0badcafe"}
    assert sagemaker_variables({"HOME": "/root"}, gather_s=1.0) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"current_host": "algo-3", "hosts": ["algo-1"]}'])
def test_a_broken_resourceconfig_is_one_clear_line(tmp_path: Path, text: str) -> None:
    env = ml_root(tmp_path, "algo-1", ["algo-1"])
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text(text)
    with pytest.raises(ConfigError, match=r"resourceconfig\.json does not identify this host"):
        sagemaker_variables(env, gather_s=1.0)


@pytest.mark.parametrize(
    ("code", "reason", "written"),
    [
        (3, "", "exit 3 error"),
        (75, "a peer\nis lost " + "é" * 2000, "exit 75 TransientError: a peer is lost " + "é" * 492),
        (65, 'KeyError: "a\\b"', "exit 65 DataError: KeyError: 'a/b'"),
        (65, "\x1b[31mred\x1b[0m\x00 \x7f é", "exit 65 DataError: [31mred[0m \x7f é"),
        (65, "\x1b\x00", "exit 65 DataError"),
    ],
)
def test_the_failure_file_begins_with_the_code_and_can_stand_in_a_json_string(
    tmp_path: Path, code: int, reason: str, written: str
) -> None:
    """It is cut between characters. The alarm of infra/modules/sagemaker has the text as it is."""
    env = {"TRAINING_JOB_NAME": "x", "TRNJOBS_ML_ROOT": str(tmp_path)}
    write_failure(env, 0, "")
    assert not (tmp_path / "output").exists()
    write_failure(env, code, reason)
    text = (tmp_path / "output" / "failure").read_text()
    assert (text, json.loads(f'"{text}"')) == (written, written)
    assert len(text.encode()) <= MAX_FAILURE_BYTES


def test_a_failure_that_cannot_be_written_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "output").touch()
    write_failure({"TRAINING_JOB_NAME": "x", "TRNJOBS_ML_ROOT": str(tmp_path)}, 75, "a peer is lost")
    assert "SageMaker was not notified of: exit 75 TransientError: a peer is lost" in capsys.readouterr().err
