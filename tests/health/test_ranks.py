"""What one rank checks, and what it leaves."""

from pathlib import Path

import pytest

from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.health import ranks as ranks_module
from pipeline.health.check import Verdict
from pipeline.health.config import HealthConfig
from pipeline.health.nodes import results_of
from pipeline.health.ranks import RankChecks, report_rank
from pipeline.parallel.world import World

QUICK = HealthConfig(burn_s=0.2, sweep_mib=64)


def test_a_sound_rank_reports_every_check_and_the_node_sums_up(tmp_path: Path) -> None:
    report = report_rank(RankChecks("cpu", World(), QUICK, {}, seed=1), tmp_path, StopSignal())
    assert [result.name for result in report.results] == ["device", "operations", "device memory", "burn"]
    written = (tmp_path / "rank-0.json").read_text()
    (tmp_path / "rank-1.json").write_text(written.replace('"node_rank": 0', '"node_rank": 1'))
    merged = results_of(tmp_path, range(2))
    assert {result.verdict for result in merged} == {Verdict.PASS}
    assert merged[0].seen == "2 x cpu"
    assert {"rank_0_fastest_round_s", "rank_1_fastest_round_s"} <= merged[3].figures.keys()


def test_a_rank_that_is_stopped_leaves_what_it_has(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted):
        report_rank(RankChecks("cpu", World(), QUICK, {}, seed=1), tmp_path, stop)
    assert results_of(tmp_path, [0]) == ()


def test_a_backend_that_cannot_be_opened_is_a_verdict(tmp_path: Path) -> None:
    report = report_rank(RankChecks("cuda", World(), QUICK, {}, seed=1), tmp_path, StopSignal())
    assert report.verdict is Verdict.FIX
    assert "no CUDA device" in report.results[0].seen


def test_a_host_is_not_filled_by_the_sweep_of_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB for each rank in the full profile: meant for devices."""
    swept: list[int] = []
    monkeypatch.setattr(ranks_module, "check_memory", lambda backend, sweep_bytes, stop: swept.append(sweep_bytes))
    config = HealthConfig(profile="full", full_sweep_mib=10**9)
    for processes in (1, 4):
        world = World(0, processes, 0, processes)
        RankChecks("cpu", world, config, {}, seed=1)._memory(CpuBackend(), stop=StopSignal())
    assert 0 < swept[1] < swept[0] < 2**45


def test_groups_and_limits() -> None:
    def chosen(world_size: int = 4, **values: object) -> dict[str, float | None]:
        config, world = HealthConfig.model_validate(values), World(0, world_size)
        checks = RankChecks("xla", world, config, {"PJRT_DEVICE": "CPU"}, seed=1).checks()
        return {check.name: check.time_limit_s for check in checks if config.wants(check.group)}

    alone = {"device": 60.0, "operations": 60.0, "device memory": 60.0, "burn": 60.0}
    assert chosen() == {**alone, "device": 90.0, "collectives": 120.0}
    assert chosen(1) == alone
    assert [*chosen(only=("collectives",))] == ["device", "collectives"]
    assert [*chosen(only=("host",))] == ["device"]
    assert chosen(profile="full", check_limit_s=1)["burn"] == 10.0
    neuron = RankChecks("xla", World(), QUICK, {"PJRT_DEVICE": "NEURON"}, seed=1).checks()
    assert {check.time_limit_s for check in neuron} == {600.0}, "its graphs are compiled first"
