"""The checks of a rank: sound backends pass, and each seeded fault gets its verdict; what a node makes of its ranks."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from pipeline.backends import RankGroup
from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import (
    CheckContext,
    CheckResult,
    HealthVerdict,
    NodeReport,
    add_slow_ranks,
    merge_rank_results,
    write_rank_report,
)
from pipeline.health.config import NUM_LIMITS, NUM_NCCOM_TESTS, HealthConfig, OperationName
from pipeline.health.device import (
    OPERATIONS,
    Operation,
    check_burn,
    check_collectives,
    check_memory,
    check_operations,
    diagnose_device_error,
    max_relative_error,
    rank_checks,
    reference,
    report_rank,
)
from pipeline.health.node import TESTS
from pipeline.parallel.process_group import open_world_group
from pipeline.parallel.world import World
from tests.kit.ports import free_port

MIB = 2**20


class Faulty(CpuBackend):
    """A core that hands over something else than it computed, from the `after`th transfer on."""

    def __init__(self, spoil: Callable[[Tensor], Tensor], after: int = 0) -> None:
        super().__init__()
        self._spoil, self._left = spoil, after

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._left -= 1
        host = super().to_host(tensors)
        return [self._spoil(tensor) for tensor in host] if self._left < 0 else host


def flipped(tensor: Tensor) -> Tensor:
    """One bit of one number, high enough to matter in any dtype."""
    bits = tensor.reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    bits[min(3, len(bits) - 1)] ^= 1 << (8 * tensor.element_size() - 3)
    return tensor


def not_a_number(tensor: Tensor) -> Tensor:
    tensor.reshape(-1)[0] = float("nan")
    return tensor


def nudged(tensor: Tensor) -> Tensor:
    """Within every tolerance, but not the same bits."""
    return tensor * (1 + 1e-6)


def test_a_sound_core_passes_with_its_errors_as_figures() -> None:
    result = check_operations(CpuBackend(), seed=3, repeats=2, stop=StopSignal())
    assert result.verdict is HealthVerdict.PASS
    assert len(result.figures) == len(OPERATIONS)
    assert 0 < float(result.figures["matmul_bf16_error"]) < 2e-2


@pytest.mark.parametrize(
    ("spoil", "after", "told"),
    [
        pytest.param(flipped, 0, "matmul fp32: relative error", id="a corrupted matmul"),
        pytest.param(flipped, 2, "matmul bf16: relative error", id="a corrupted bf16 matmul"),
        pytest.param(not_a_number, 0, "matmul fp32: a value is not finite", id="NaN"),
        pytest.param(
            nudged, 1, "matmul fp32: two runs with the same inputs have different results", id="not deterministic"
        ),
    ],
)
def test_a_wrong_core_is_sent_back(spoil: Callable[[Tensor], Tensor], after: int, told: str) -> None:
    result = check_operations(Faulty(spoil, after), seed=3, repeats=2, stop=StopSignal())
    assert result.verdict is HealthVerdict.RETRY
    assert result.seen.startswith(told)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_tolerance_of_each_operation_finds_a_wrong_element(operation: Operation) -> None:
    inputs = operation.inputs(torch.Generator().manual_seed(5))
    for right in reference(operation, inputs):
        wrong = right.clone().reshape(-1)
        wrong[0] += float(right.abs().max()) * max(0.1, 2 * operation.tolerance)
        assert max_relative_error(wrong.reshape(right.shape), right) > operation.tolerance


def test_memory_that_changes_is_found() -> None:
    assert check_memory(CpuBackend(), sweep_bytes=128 * MIB, stop=StopSignal()).verdict is HealthVerdict.PASS
    result = check_memory(Faulty(flipped, after=1), sweep_bytes=128 * MIB, stop=StopSignal())
    assert result.verdict is HealthVerdict.RETRY
    assert result.seen.startswith("1 words of chunk 1 of 2")


def test_the_burn_gives_the_figures_that_peers_are_compared_by() -> None:
    ticks = iter(float(tick) for tick in range(1000))
    result = check_burn(CpuBackend(), seconds=4.0, stop=StopSignal(), clock=lambda: next(ticks))
    assert result.figures["fastest_round_s"] == 1.0
    assert int(result.figures["rounds"]) >= 3


def test_a_stop_ends_it() -> None:
    stop, backend = StopSignal(), CpuBackend()
    stop.set("SIGTERM")
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_operations(backend, seed=1, repeats=1, stop=stop),
        lambda: check_memory(backend, sweep_bytes=64 * MIB, stop=stop),
        lambda: check_burn(backend, seconds=1.0, stop=stop),
    )
    for check in checks:
        with pytest.raises(Preempted):
            check()


@pytest.mark.parametrize(
    ("text", "backend", "kind"),
    [
        ("nrt_execute: status=5 NRT_TIMEOUT", CpuBackend(), TransientError),
        ("NRT_INVALID: nrt_init failed", CpuBackend(), ConfigError),
        ("INTERNAL: something nobody has seen", Faulty(not_a_number), TransientError),
        ("the loader ended at step 3 of 4", CpuBackend(), RuntimeError),
        ("CUDA error: device-side assert triggered", Faulty(not_a_number), RuntimeError),
    ],
)
def test_the_error_tells_what_to_do(text: str, backend: CpuBackend, kind: type[BaseException]) -> None:
    error = RuntimeError(text)
    better = diagnose_device_error(error, backend, HealthConfig(), stop=StopSignal())
    assert type(better) is kind
    assert (better is error) == (kind is RuntimeError)
    assert text.split(" ")[0].rstrip(":") in str(better)


def test_what_the_settings_allow_is_no_fault_of_the_device() -> None:
    error = RuntimeError("the loader ended at step 3 of 4")
    coarse = Faulty(lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))
    lenient = HealthConfig(tolerances=dict.fromkeys(get_args(OperationName), 0.05))
    for config, kind in ((HealthConfig(), TransientError), (lenient, RuntimeError)):
        assert type(diagnose_device_error(error, coarse, config, stop=StopSignal())) is kind


# Collectives between ranks that are well and sick.

QUICK = HealthConfig()
PATIENT_S, LIMIT_S = 120.0, 5.0


class FaultyGather(CpuBackend):
    """What becomes of a rank when it gathers: numbers of others `swapped`, or it `dies`, or is `absent`."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def all_gather(self, tensor: Tensor, ranks: RankGroup | None = None) -> Tensor:
        found = super().all_gather(tensor, ranks)
        if self.fault == "dies":
            os._exit(1)
        if self.fault == "absent":
            time.sleep(600)
        count = len(tensor)
        return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]]) if self.fault else found


def collectives(rank: int, world: int, port: int, fault: str, told: Connection) -> None:
    """Check collectives in one rank; `fault` is rank 1's."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    open_world_group(None, PATIENT_S)
    backend, limit_s = FaultyGather(fault if rank == 1 else ""), LIMIT_S if fault in ("absent", "dies") else PATIENT_S
    ctx = CheckContext(StopSignal())
    told.send(check_collectives(backend, World(rank, world), limit_s=limit_s, ctx=ctx, sizes_bytes=(8, 4096)))
    os._exit(0)  # other ranks may be gone: no orderly goodbye


@contextmanager
def ranks_of(world: int, fault: str) -> Iterator[Callable[[int], CheckResult]]:
    """Start ranks as processes, forked from a server that has imported torch; yields a function that waits for one."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port, processes, ears = free_port(), [], list[Connection]()
    for rank in range(world):
        ear, mouth = context.Pipe(duplex=False)
        processes.append(context.Process(target=collectives, args=(rank, world, port, fault, mouth), daemon=True))
        processes[-1].start()
        mouth.close()
        ears.append(ear)

    def result(rank: int) -> CheckResult:
        assert ears[rank].poll(PATIENT_S), f"rank {rank} says nothing"
        found: CheckResult = ears[rank].recv()
        return found

    try:
        yield result
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.stage
def test_sound_collectives_pass_with_their_bandwidth() -> None:
    with ranks_of(3, "") as result:
        for rank in range(3):
            found = result(rank)
            assert found.verdict is HealthVerdict.PASS, found
            assert len(found.figures) == 3 * 2 and all(float(rate) > 0 for rate in found.figures.values())


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("swapped", "of 6 numbers are wrong in all-gather of 8 bytes, the first at 0 (from rank 0): "),
        ("absent", "in all-gather of 8 bytes: "),
        ("dies", "in all-gather of 8 bytes: "),
    ],
)
def test_a_sick_rank_is_noticed(fault: str, seen: str) -> None:
    with ranks_of(2, fault) as result:
        found = result(1 if fault == "swapped" else 0)
        assert found.verdict is HealthVerdict.RETRY and seen.replace("of 6", "of 4") in found.seen, found
        if fault == "swapped":
            assert result(0).verdict is HealthVerdict.PASS, "it is not left waiting"
        if fault == "absent":
            assert "Ranks 1 failed to pass" in found.seen, found


# One rank.


def of_rank(folder: Path, backend: str, stop: StopSignal | None = None) -> NodeReport:
    checks = rank_checks(backend, World(), QUICK, os.environ if backend == "cuda" else {}, seed=1)
    return report_rank(checks, QUICK, 0, folder, stop or StopSignal())


def test_a_sound_rank_reports_every_check_and_the_node_sums_up(tmp_path: Path) -> None:
    report = of_rank(tmp_path, "cpu")
    assert [result.name for result in report.results] == ["device", "operations", "device memory", "burn"]
    written = (tmp_path / "rank-0.json").read_text()
    (tmp_path / "rank-1.json").write_text(written.replace('"node_rank": 0', '"node_rank": 1'))
    merged = merge_rank_results(tmp_path, range(2))
    assert {result.verdict for result in merged} == {HealthVerdict.PASS}
    assert merged[0].seen == "2 x cpu"
    assert {"rank_0_fastest_round_s", "rank_1_fastest_round_s"} <= merged[3].figures.keys()


def test_a_gpu_passes_or_is_not_there(tmp_path: Path) -> None:
    report = of_rank(tmp_path, "cuda")
    if torch.cuda.is_available():
        assert report.verdict is HealthVerdict.PASS, report.results
    else:
        assert report.verdict is HealthVerdict.FIX and "no CUDA device" in report.results[0].seen


def test_a_rank_that_is_stopped_leaves_what_it_has(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted):
        of_rank(tmp_path, "cpu", stop)
    assert merge_rank_results(tmp_path, [0]) == ()


def test_groups_and_limits() -> None:
    def chosen(world_size: int = 4, **values: object) -> dict[str, float | None]:
        config, world = HealthConfig.model_validate(values), World(0, world_size)
        checks = rank_checks("xla", world, config, {"PJRT_DEVICE": "CPU"}, seed=1)
        return {check.name: check.time_limit_s for check in checks if config.includes(check.group)}

    alone = {"device": 120.0, "operations": 60.0, "device memory": 60.0, "burn": 60.0}
    assert chosen() == {**alone, "collectives": 180.0} and chosen(1) == alone
    assert [*chosen(only=("collectives",))] == ["device", "collectives"]
    assert [*chosen(only=("host",))] == ["device"]
    neuron = rank_checks("xla", World(), QUICK, {"PJRT_DEVICE": "NEURON"}, seed=1)
    assert {check.time_limit_s for check in neuron} == {600.0, 1200.0}, "its graphs are compiled first"
    limits = [
        QUICK.stage_limit_s(on_neuron=on_neuron, num_nodes=nodes, processes=processes)
        for on_neuron, nodes, processes in ((False, 1, 1), (True, 1, 1), (True, 1, 32), (True, 2, 32))
    ]
    assert limits == [540.0, 4860.0, 6060.0, 6660.0]
    assert sum(limit or 0.0 for limit in chosen().values()) == NUM_LIMITS * 60.0 and len(TESTS) == NUM_NCCOM_TESTS
    assert HealthConfig(only=("host",)).stage_limit_s(on_neuron=True, num_nodes=1, processes=32) == 0.0


# The ranks of a node.


def report(folder: Path, rank: int, *results: CheckResult, is_finished: bool = True) -> None:
    write_rank_report(folder, NodeReport(rank, f"rank {rank}", results), is_finished=is_finished)


def burned(seconds: float) -> CheckResult:
    return CheckResult("burn", HealthVerdict.PASS, figures={"fastest_round_s": seconds})


def test_a_rank_that_failed_is_reported_apart_and_one_without_a_word_is_named(tmp_path: Path) -> None:
    report(tmp_path, 4, burned(1.0), CheckResult("address", HealthVerdict.PASS, "10.0.0.7"))
    report(tmp_path, 5, CheckResult("operations", HealthVerdict.RETRY, "matmul fp32: relative error 0.5"))
    (tmp_path / "rank-6.json").write_text('{"half')
    report(tmp_path, 7, burned(1.0), is_finished=False)
    merged = {result.name: result for result in merge_rank_results(tmp_path, range(4, 7))}
    assert merged["ranks"].seen == "rank 6 of this node exited without a report"
    assert merged["operations"].seen == "rank 5: matmul fp32: relative error 0.5"
    assert (merged["burn"].seen, merged["address"].seen) == ("passed", "10.0.0.7")
    late, before = merge_rank_results(tmp_path, [7])
    assert late.seen == "rank 7 of this node exited without a report after check burn" and before.name == "burn"


@pytest.mark.parametrize(("seconds", "slow"), [((1.0, 1.1, 2.4, 0.9), [2]), ((1.0, 1.4), []), ((3.0, 1.0), [0])])
@pytest.mark.parametrize(("shared", "verdict"), [(0, HealthVerdict.RETRY), (1, HealthVerdict.WARN)])
def test_a_slow_core_is_named_among_all_nodes(
    tmp_path: Path, seconds: Sequence[float], slow: list[int], shared: int, verdict: HealthVerdict
) -> None:
    reports = []
    for rank, one in enumerate(seconds):
        device = CheckResult("device", HealthVerdict.PASS, "xla:NEURON", figures={"shares_host_cpu": shared})
        report(tmp_path, rank, device, burned(one))
        reports.append(NodeReport(rank, f"host-{rank}", merge_rank_results(tmp_path, [rank])))
    annotated = add_slow_ranks(reports)
    assert [one.node_rank for one in annotated if one.verdict is not HealthVerdict.PASS] == slow
    assert all(one.results[-1].verdict is verdict for one in annotated if one.node_rank in slow)
