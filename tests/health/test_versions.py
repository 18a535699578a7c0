"""Does the runtime of the image fit the driver of the machine: told before anything opens a device."""

from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.health import tools
from pipeline.health.check import CheckContext, CheckResult, NodeReport, Verdict, gang_error, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.neuron import DRIVER_FIT, VERSIONS, find_versions, judge_driver, neuron_instance, versions_check

ROOT = Path(__file__).parents[2]
PASS, WARN, FIX = Verdict.PASS, Verdict.WARN, Verdict.FIX


@pytest.mark.unit
@pytest.mark.parametrize(
    ("driver", "runtime", "verdict"),
    [
        ("2.27.4.0", "2.31.24.0", PASS),
        ("2.28.0.0", "2.31.24.0", PASS),
        ("2.29.0.0", "2.31.24.0", FIX),
        ("2.30.2.0", "2.32.10.0", FIX),
        ("2.30.2.0", "2.33.1.0", PASS),
        ("3.0.1", "2.40", PASS),
        ("2.100.1.0", "2.32.1.0", FIX),  # numbers, no text
        ("2.30.2.0", "2.31.24.0, 2.33.1.0", PASS),  # which one is loaded is not known
        ("2.30.2.0", None, WARN),
        ("2.27.4.0", None, PASS),
        ("2.x.1234.0", "2.31.24.0", WARN),
        ("2.30.2.0", "1", WARN),
        ("", "2.31.24.0", WARN),
    ],
)
def test_driver_and_runtime(driver: str, runtime: str | None, verdict: Verdict) -> None:
    versions = {"driver": driver} | ({"runtime": runtime} if runtime is not None else {})
    result = judge_driver(versions)
    assert result is not None and result.verdict is verdict, result
    assert driver in result.seen and (runtime or "not found") in result.seen
    if verdict is not PASS:
        assert "2.33" in result.expected and result.next_command
    assert judge_driver({"runtime": "2.31.24.0"}) is None, "no driver: no Neuron machine"


def machine(folder: Path, driver: str, runtime: str) -> dict[str, str]:
    """What is found where the files of driver and runtime lie as their packages put them."""
    libraries = folder / "lib"
    libraries.mkdir()
    (libraries / f"libnrt.so.{runtime}").touch()
    (libraries / "libnrt.so.1").symlink_to(f"libnrt.so.{runtime}")
    (folder / "version").write_text(f"{driver}\n")
    return find_versions(driver_file=folder / "version", libraries=libraries)


@pytest.mark.unit
@pytest.mark.parametrize("driver", ["2.30.2.0", "2.31.7.0"])
def test_no_machine_of_that_image_will_do(tmp_path: Path, driver: str) -> None:
    found = machine(tmp_path, driver, "2.31.24.0")
    check = versions_check({}, find=lambda: found)
    report = run_checks([check], HealthConfig(only=("cores",)), node_rank=0, host="i-0", stop=StopSignal())
    assert [(one.name, one.verdict) for one in report.results] == [(VERSIONS, PASS), (DRIVER_FIT, FIX)]
    assert found["torch"] and found["driver"] == driver
    error = gang_error([NodeReport(0, "i-0", report.results)])
    assert isinstance(error, ConfigError) and (error.exit_code, error.retry) == (78, False)
    assert f"driver {driver}, runtime 2.31.24.0: nrt_init fails" in error.seen
    for way_out in ("ami_id", "SageMaker", "runtime 2.33", "docs/neuron.md, When no such machine image is left"):
        assert way_out in error.next_command
    assert "**When no such machine image is left**" in (ROOT / "docs" / "neuron.md").read_text()


@pytest.mark.unit
def test_it_comes_before_whatever_opens_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def opened(*args: object, **kwargs: object) -> tuple[CheckResult, ...]:
        order.append("a device is opened")
        return ()

    def found() -> dict[str, str]:
        order.append("versions are compared")
        return machine(tmp_path, "2.30.2.0", "2.31.24.0")

    monkeypatch.setattr(tools, "check_neuron_ls", opened)
    monkeypatch.setattr(tools, "check_nccom", opened)
    config = HealthConfig()
    checks = tools.tool_checks(neuron_instance("trn1.32xlarge"), config, num_nodes=1, processes=32, on_neuron=True)
    report = run_checks([*checks, versions_check({}, find=found)], config, node_rank=0, host="h", stop=StopSignal())
    assert order == ["versions are compared", "a device is opened"]
    spared = [one.name for one in report.results if one.seen.startswith("not run")]
    assert spared == ["nccom-test all_reduce", "nccom-test all_gather", "nccom-test all_reduce bandwidth"]


@pytest.mark.unit
def test_what_is_told_where_nothing_is_wrong() -> None:
    results = versions_check({"code": "abc"}, find=lambda: {"torch": "2.9.1"}).run(CheckContext(StopSignal()))
    assert not isinstance(results, CheckResult)
    (result,) = results
    assert result.figures == {"torch": "2.9.1", "code": "abc"}
