"""A node of a training job: who it is, from the files of SageMaker, and what it leaves there when it fails."""

import json
import socket
from pathlib import Path

import pytest

from jobs.node.sagemaker import MAX_FAILURE_BYTES, sagemaker_variables, write_failure
from pipeline.core.errors import ConfigError, TransientError
from tests.jobs.node.entries import entry, python
from tests.kit.ports import free_port

HOSTS = [f"algo-{number}" for number in range(1, 13)]


def ml_root(root: Path, own: str, hosts: list[str], interface: str = "eth0") -> dict[str, str]:
    """The environment of a container whose /opt/ml is `root`."""
    config = {
        "current_host": own,
        "hosts": hosts,
        "network_interface_name": interface,
        "current_instance_type": "ml.trn1.32xlarge",
        "current_group_name": "homogeneousCluster",
        "instance_groups": [{"instance_group_name": "homogeneousCluster", "hosts": hosts}],
    }
    (root / "input" / "config").mkdir(parents=True)
    (root / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))
    return {"TRAINING_JOB_NAME": "relevance-train-r1a2-0badcafe", "TRNJOBS_ML_ROOT": str(root)}


class Names:
    """Names that resolve after some time; nobody really waits."""

    def __init__(self, after_s: float = 0.0) -> None:
        self.now, self.after_s, self.asked = 0.0, after_s, list[str]()

    def resolve(self, host: str) -> str:
        self.asked.append(host)
        if self.now < self.after_s:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "10.0.0.7"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def words(self, env: dict[str, str], gather_s: float = 900.0) -> dict[str, str]:
        return sagemaker_variables(
            env, gather_s=gather_s, resolve=self.resolve, sleep=self.sleep, clock=lambda: self.now
        )


def test_trap_1_of_twelve_hosts_each_gets_its_own_rank_in_the_order_of_names(tmp_path: Path) -> None:
    ranks = {}
    for own in HOSTS:
        names = Names()
        words = names.words(ml_root(tmp_path / own, own, HOSTS))
        ranks[own] = int(words["TRNJOBS_NODE"])
        assert (words["TRNJOBS_NODES"], names.asked) == ("12", ["algo-1"])
        assert words["TRNJOBS_MAIN"] == words["MASTER_ADDR"] == "10.0.0.7"
        assert words["TRNJOBS_JOB_ID"] == "relevance-train-r1a2-0badcafe"
    assert [ranks[host] for host in ("algo-1", "algo-10", "algo-11", "algo-12", "algo-2")] == [0, 1, 2, 3, 4]
    assert sorted(ranks.values()) == list(range(12))


def test_trap_2_a_name_that_resolves_after_40_seconds(tmp_path: Path) -> None:
    env = ml_root(tmp_path, "algo-2", ["algo-1", "algo-2"])
    assert Names(after_s=40.0).words(env)["TRNJOBS_MAIN"] == "10.0.0.7"
    with pytest.raises(TransientError, match="algo-1 has no address after 20 s"):
        Names(after_s=40.0).words(env, gather_s=20.0)


def test_a_single_host_is_no_gang_and_another_machine_no_training_job(tmp_path: Path) -> None:
    words = Names().words(ml_root(tmp_path, "algo-1", ["algo-1"]))
    assert words == {"TRNJOBS_JOB_ID": "relevance-train-r1a2-0badcafe"}
    assert Names().words({"HOME": "/root"}) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"current_host": "algo-3", "hosts": ["algo-1"]}'])
def test_a_broken_resourceconfig_is_one_clear_line(tmp_path: Path, text: str) -> None:
    env = ml_root(tmp_path, "algo-1", ["algo-1"])
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text(text)
    with pytest.raises(ConfigError, match=r"resourceconfig\.json does not say which host"):
        Names().words(env)


def test_the_failure_file_begins_with_the_code_and_is_cut_between_characters(tmp_path: Path) -> None:
    env = {"TRAINING_JOB_NAME": "x", "TRNJOBS_ML_ROOT": str(tmp_path)}
    write_failure(env, 0, "")
    assert not (tmp_path / "output").exists()
    write_failure(env, 75, "a peer\nis lost " + "é" * 2000)
    written = (tmp_path / "output" / "failure").read_bytes()
    assert written.decode().startswith("exit 75 TransientError: a peer is lost é")
    assert MAX_FAILURE_BYTES - 2 < len(written) <= MAX_FAILURE_BYTES
    write_failure(env, 3, "")
    assert (tmp_path / "output" / "failure").read_text() == "exit 3 error"


def test_a_failure_that_cannot_be_written_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "output").touch()
    write_failure({"TRAINING_JOB_NAME": "x", "TRNJOBS_ML_ROOT": str(tmp_path)}, 75, "a peer is lost")
    said = capsys.readouterr().err
    assert said.startswith(f"trnjobs-entry: cannot write {tmp_path}/output/failure: ")
    assert said.endswith("SageMaker is not told: exit 75 TransientError: a peer is lost\n")


@pytest.mark.parametrize(
    ("reason", "written"),
    [
        ('KeyError: "a\\b"', "KeyError: 'a/b'"),
        ('{"level": "error",\t"path": "C:\\\\x"}', "{'level': 'error', 'path': 'C://x'}"),
        ("\x1b[31mred\x1b[0m\x00 \x7f é", "[31mred[0m \x7f é"),
        ("\x1b\x00", ""),
    ],
)
def test_a_failure_can_stand_in_a_json_string_as_it_is(tmp_path: Path, reason: str, written: str) -> None:
    """As the alarm of infra/modules/sagemaker has it."""
    write_failure({"TRAINING_JOB_NAME": "x", "TRNJOBS_ML_ROOT": str(tmp_path)}, 65, reason)
    text = (tmp_path / "output" / "failure").read_text()
    assert text == f"exit 65 DataError: {written}".removesuffix(": ")
    assert json.loads(f'"{text}"') == text


@pytest.mark.parametrize("failing", [0, 1])
def test_both_nodes_of_a_gang_leave_the_same_line(tmp_path: Path, failing: int) -> None:
    """The main node is at a loopback address; the other one fails, or it does."""
    hosts, port = ["127.0.0.1", "127.0.0.2"], str(free_port())
    code = f"import os, sys, time; sys.exit(65) if os.environ['TRNJOBS_NODE'] == '{failing}' else time.sleep(100)"
    nodes = []
    for own in hosts:
        env = ml_root(tmp_path / own, own, hosts, "lo") | {"MASTER_PORT": port}
        nodes.append(entry(*python(code), env=env))
    for node in nodes:
        node.finish()
    lines = {(tmp_path / own / "output" / "failure").read_text() for own in hosts}
    assert nodes[0].returncode == 65
    assert len(lines) == 1, lines
    assert lines.pop().startswith("exit 65 DataError")
