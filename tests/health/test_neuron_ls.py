"""neuron-ls: older and newer answers, broken ones, and none."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health.check import CheckResult, Verdict
from pipeline.health.neuron import (
    Device,
    NeuronInstance,
    check_neuron_ls,
    judge_devices,
    judge_processes,
    neuron_instance,
    parse_neuron_ls,
)
from tests.health.fake_tools import environment, fake_tool, neuron_ls, says

PASS, WARN, RETRY, FIX = Verdict.PASS, Verdict.WARN, Verdict.RETRY, Verdict.FIX
HELD = {"pid": 1966680, "command": "", "neuron_runtime_version": "2.34.10"}


def instance(name: str) -> NeuronInstance:
    found = neuron_instance(name)
    assert found is not None
    return found


TRN1 = instance("trn1.32xlarge")


def parsed(devices: list[dict[str, Any]]) -> tuple[Device, ...]:
    found = parse_neuron_ls(json.dumps(devices, indent=4))
    assert found is not None
    return found


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("trn1.32xlarge", neuron_ls()),
        ("trn1.32xlarge", neuron_ls(new=False)),
        ("trn1n.32xlarge", neuron_ls()),
        ("trn1.2xlarge", neuron_ls(1)),
        ("trn2.48xlarge", neuron_ls(cores=4, memory_gib=96, lnc=2)),
        ("trn2.48xlarge", neuron_ls(cores=8, memory_gib=96, lnc=1)),
        ("trn2.48xlarge", neuron_ls(cores=4, memory_gib=96, new=False)),
        ("trn2.3xlarge", neuron_ls(1, cores=4, memory_gib=96, lnc=2)),
        ("trn9.48xlarge", neuron_ls(3, cores=5)),
    ],
)
def test_whole_machines(name: str, devices: list[dict[str, Any]]) -> None:
    for form in (devices, [{"instance_type": name, "instance_id": "i-0", **device} for device in devices]):
        result = judge_devices(parsed(form), instance(name))
        assert result.verdict is PASS, result
        assert result.figures["num_devices"] == len(devices)
        assert judge_processes(parsed(form)).verdict is PASS


def without(index: int) -> list[dict[str, Any]]:
    return [device for device in neuron_ls() if device["neuron_device"] != index]


def changed(index: int, **values: Any) -> list[dict[str, Any]]:
    devices = neuron_ls()
    devices[index] |= values
    return devices


@pytest.mark.unit
@pytest.mark.parametrize(
    ("devices", "verdict", "seen"),
    [
        (without(7), RETRY, "missing: neuron7"),
        ([], RETRY, "missing: neuron0, neuron1"),
        (changed(3, nc_count=1), RETRY, "neuron3 has 1 cores"),
        (changed(3, memory_size=16 * 2**30), RETRY, "neuron3 has 16"),
        (changed(0, instance_type="trn1n.32xlarge"), FIX, "this is a trn1n.32xlarge"),
        (neuron_ls(17), FIX, "17 devices"),
    ],
)
def test_sick_machines(devices: list[dict[str, Any]], verdict: Verdict, seen: str) -> None:
    result = judge_devices(parsed(devices), TRN1)
    assert result.verdict is verdict
    assert result.seen.startswith(seen)
    assert result.expected and result.next_command


@pytest.mark.unit
def test_devices_the_container_was_not_given() -> None:
    assert judge_devices(parsed(without(7)), TRN1, unmapped={7, 8}).verdict is FIX
    assert judge_devices(parsed(without(7)), TRN1, unmapped={8}).verdict is RETRY


@pytest.mark.unit
def test_one_core_of_trn2_is_missed() -> None:
    devices = neuron_ls(cores=4, memory_gib=96, lnc=2)
    devices[5]["nc_count"] = 3
    assert judge_devices(parsed(devices), instance("trn2.48xlarge")).seen == "neuron5 has 3 cores"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("process", "verdict"),
    [
        (HELD, RETRY),
        ({"pid": 12, "command": "python -m pipeline train", "neuron_runtime_version": "2.31"}, RETRY),
        ({"pid": 12}, RETRY),
        ({"pid": 77, "command": "python"}, PASS),  # our own
        ({"pid": 12, "command": "neuron-ls -j", "neuron_runtime_version": "NA"}, PASS),
        ({"pid": 12, "command": "/opt/aws/neuron/bin/neuron-monitor -c a"}, PASS),
    ],
)
def test_processes(process: dict[str, Any], verdict: Verdict) -> None:
    devices = neuron_ls()
    for index in (0, 15):
        devices[index]["neuron_processes"] = [process]
    result = judge_processes(parsed(devices), own_pids={77})
    assert result.verdict is verdict
    if verdict is RETRY:
        assert f"process {process['pid']}" in result.seen and "neuron0, neuron15" in result.seen
        assert str(process["pid"]) in result.next_command


@pytest.mark.unit
@pytest.mark.parametrize("text", ["", "null", "{}", "[1]", '[{"neuron_device": "x"}]', "error: no devices", "[null]"])
def test_what_is_no_list_of_devices(text: str) -> None:
    assert parse_neuron_ls(text) is None


@pytest.mark.unit
@pytest.mark.parametrize("indent", [None, 4])
def test_an_answer_cut_at_any_byte(indent: int | None) -> None:
    for devices in (neuron_ls(3), neuron_ls(3, new=False), neuron_ls(2, cores=4, memory_gib=96, lnc=2)):
        text = json.dumps(devices, indent=indent)
        assert parse_neuron_ls(text) is not None
        assert all(parse_neuron_ls(text[:end]) is None for end in range(len(text)))


def check(folder: Path, name: str = "trn1.32xlarge", *, timeout_s: float = 120.0) -> tuple[CheckResult, ...]:
    return check_neuron_ls(
        neuron_instance(name),
        stop=StopSignal(),
        timeout_s=timeout_s,
        wait_s=0.01,
        env=environment(folder),
        sysfs=folder / "sysfs",
        dev=folder / "dev",
    )


@pytest.mark.unit
def test_checking_a_good_machine(tmp_path: Path) -> None:
    says(tmp_path, "neuron-ls", json.dumps(neuron_ls()), exit_code=1)  # its exit codes are not documented
    assert [(result.name, result.verdict) for result in check(tmp_path)] == [
        ("neuron-devices", PASS),
        ("neuron-processes", PASS),
    ]


@pytest.mark.unit
def test_no_tool(tmp_path: Path) -> None:
    (here,) = check(tmp_path, "")
    assert here.verdict is PASS and here.seen.startswith("not a Neuron machine")
    (there,) = check(tmp_path)
    assert there.verdict is FIX and "neuron-ls is not installed on this trn1.32xlarge" in there.seen


@pytest.mark.unit
@pytest.mark.parametrize("text", ["", "null", json.dumps(neuron_ls())[:-40]])
def test_an_answer_that_is_none(tmp_path: Path, text: str) -> None:
    says(tmp_path, "neuron-ls", text)
    (result,) = check(tmp_path)
    assert result.verdict is RETRY
    (elsewhere,) = check(tmp_path, "")
    assert elsewhere.verdict is PASS


@pytest.mark.fault
def test_one_that_hangs(tmp_path: Path) -> None:
    fake_tool(tmp_path, "neuron-ls", "exec sleep 60")
    (result,) = check(tmp_path, timeout_s=0.3)
    assert result.verdict is RETRY and "did not end within 0.3 s" in result.seen


@pytest.mark.unit
@pytest.mark.parametrize("first", ["echo busy >&2; exit 1", "cat held"])
def test_a_passing_trouble_is_waited_for(tmp_path: Path, first: str) -> None:
    (tmp_path / "good").write_text(json.dumps(neuron_ls()))
    (tmp_path / "held").write_text(json.dumps(changed(2, neuron_processes=[HELD])))
    fake_tool(tmp_path, "neuron-ls", f"cd {tmp_path}; if [ -e again ]; then cat good; else touch again; {first}; fi")
    assert [result.verdict for result in check(tmp_path)] == [PASS, PASS]


@pytest.mark.unit
def test_a_core_that_stays_held(tmp_path: Path) -> None:
    says(tmp_path, "neuron-ls", json.dumps(changed(2, neuron_processes=[HELD])))
    assert [result.verdict for result in check(tmp_path)] == [PASS, RETRY]


@pytest.mark.unit
def test_the_driver_has_what_the_container_has_not(tmp_path: Path) -> None:
    for index in range(16):
        (tmp_path / "sysfs" / f"neuron{index}").mkdir(parents=True)
        if index < 8:
            (tmp_path / "dev" / f"neuron{index}").mkdir(parents=True)
    says(tmp_path, "neuron-ls", json.dumps(neuron_ls()[:8]))
    result, _ = check(tmp_path)
    assert result.verdict is FIX and "neuron8, neuron9" in result.seen


@pytest.mark.unit
def test_devices_where_none_are_expected_are_looked_at_all_the_same(tmp_path: Path) -> None:
    says(tmp_path, "neuron-ls", json.dumps(changed(0, neuron_processes=[HELD])))
    assert [result.verdict for result in check(tmp_path, "")] == [PASS, RETRY]
