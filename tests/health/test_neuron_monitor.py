"""neuron-monitor: older and newer lines, broken ones, and none."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health.instances import NeuronInstance, neuron_instance
from pipeline.health.neuron_monitor import check_neuron_monitor, judge_hardware, parse_neuron_monitor
from pipeline.health.verdict import CheckResult, Verdict
from tests.health.fake_tools import environment, fake_tool, neuron_monitor, says

PASS, WARN, RETRY, FIX = Verdict.PASS, Verdict.WARN, Verdict.RETRY, Verdict.FIX


@pytest.mark.unit
@pytest.mark.parametrize("new", [True, False])
def test_counters_and_hardware(new: bool) -> None:
    snapshot = parse_neuron_monitor(json.dumps(neuron_monitor(new=new, mem_ecc_corrected=7, sram_ecc_uncorrected=1)))
    assert snapshot is not None and snapshot.neuron_hardware_info is not None
    counts = snapshot.counts()
    assert len(counts) == 16 and counts[0].mem_corrected == 0
    assert (counts[15].device, counts[15].mem_corrected, counts[15].sram_uncorrected) == (15, 7, 1)
    assert snapshot.neuron_hardware_info.neuron_device_count == 16
    assert snapshot.instance_info and snapshot.instance_info.instance_id == "i-0123456789abcdef0"


@pytest.mark.unit
def test_the_last_whole_line_counts() -> None:
    lines = [json.dumps(neuron_monitor(mem_ecc_corrected=count)) for count in (1, 2, 3)]
    text = "\n".join(["starting", *lines[:2], lines[2][:100]])
    snapshot = parse_neuron_monitor(text)
    assert snapshot and snapshot.counts()[15].mem_corrected == 2


@pytest.mark.unit
@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"system_data": 3}', "neuron-monitor: no devices"])
def test_lines_that_tell_nothing(text: str) -> None:
    assert parse_neuron_monitor(text) is None


@pytest.mark.unit
@pytest.mark.parametrize("new", [True, False])
def test_a_line_cut_at_any_byte(new: bool) -> None:
    for indent in (None, 2):
        text = json.dumps(neuron_monitor(2, new=new, mem_ecc_uncorrected=1), indent=indent)
        assert all(parse_neuron_monitor(text[:end]) is None for end in range(len(text)))


@pytest.mark.unit
@pytest.mark.parametrize("group", ["system_data", "neuron_hardware_info", "instance_info"])
@pytest.mark.parametrize("value", [None, {}, {"error": "not available"}])
def test_groups_that_are_not_there(group: str, value: object) -> None:
    snapshot = parse_neuron_monitor(json.dumps({**neuron_monitor(), group: value}))
    assert snapshot is not None
    assert snapshot.counts() == () or group != "system_data"
    result = judge_hardware(snapshot, neuron_instance("trn1.32xlarge") or NeuronInstance(""))
    assert result.verdict is (WARN if group == "neuron_hardware_info" else PASS)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("line", "name", "verdict"),
    [
        (neuron_monitor(), "trn1.32xlarge", PASS),
        (neuron_monitor(1), "trn1.2xlarge", PASS),
        (neuron_monitor(1), "trn1.32xlarge", FIX),  # tells its type
        ({**neuron_monitor(15), "instance_info": {}}, "trn1.32xlarge", RETRY),
        (neuron_monitor(5), "trn9.48xlarge", PASS),
    ],
)
def test_hardware(line: dict[str, Any], name: str, verdict: Verdict) -> None:
    snapshot = parse_neuron_monitor(json.dumps(line))
    assert snapshot is not None
    assert judge_hardware(snapshot, neuron_instance(name) or NeuronInstance("")).verdict is verdict


def check(folder: Path, name: str = "trn1.32xlarge", timeout_s: float = 20.0) -> list[tuple[str, Verdict]]:
    return [(result.name, result.verdict) for result in results(folder, name, timeout_s)]


def results(folder: Path, name: str, timeout_s: float = 20.0) -> tuple[CheckResult, ...]:
    return check_neuron_monitor(
        neuron_instance(name),
        stop=StopSignal(),
        timeout_s=timeout_s,
        env=environment(folder),
        sysfs=folder / "sysfs",
    )


@pytest.mark.unit
def test_it_runs_for_ever_and_is_given_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "line").write_text(json.dumps(neuron_monitor(mem_ecc_uncorrected=1)) + "\n")
    fake_tool(tmp_path, "neuron-monitor", f'cp "$2" {tmp_path}/config; while :; do cat {tmp_path}/line; sleep 1; done')
    assert check(tmp_path) == [("neuron-ecc", RETRY), ("neuron-hardware", PASS)]
    config = json.loads((tmp_path / "config").read_text())
    assert config["system_metrics"][0]["type"] == "neuron_hw_counters"


@pytest.mark.fault
def test_no_answer_is_a_warning(tmp_path: Path) -> None:
    both = [("neuron-ecc", WARN), ("neuron-hardware", WARN)]
    assert check(tmp_path) == both
    says(tmp_path, "neuron-monitor", "")
    assert check(tmp_path) == both
    says(tmp_path, "neuron-monitor", json.dumps(neuron_monitor())[:500])
    assert check(tmp_path) == both
    fake_tool(tmp_path, "neuron-monitor", "exec sleep 60")
    assert check(tmp_path, timeout_s=0.3) == both


@pytest.mark.unit
def test_without_the_tool_the_driver_still_tells(tmp_path: Path) -> None:
    counter = tmp_path / "sysfs" / "neuron4" / "stats" / "hardware" / "mem_ecc_uncorrected"
    counter.parent.mkdir(parents=True)
    counter.write_text("1\n")
    assert check(tmp_path) == [("neuron-ecc", RETRY), ("neuron-hardware", WARN)]


@pytest.mark.unit
def test_not_a_neuron_machine(tmp_path: Path) -> None:
    (result,) = results(tmp_path, "")
    assert result.verdict is PASS and result.seen.startswith("not a Neuron machine")
