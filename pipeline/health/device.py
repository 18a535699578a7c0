"""The health checks of a rank, which verify its core and the collectives with all other ranks.

To check the core, the results of operations are compared with float64, patterns are written to the device memory, and a
short burn measures the speed. If a device error occurs during training, the operations are checked again to distinguish
a faulty machine from a bug.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.backends import Backend, RankGroup, device_guard, on_neuron, process_group
from pipeline.core.errors import TransientError, first_line
from pipeline.core.format import format_bytes
from pipeline.core.neuron_errors import device_error
from pipeline.core.stop import StopSignal
from pipeline.health.check import (
    BURN,
    OPERATIONS_CHECK,
    ROUND,
    SHARED,
    USE_ANOTHER_MACHINE,
    Check,
    CheckContext,
    CheckResult,
    HealthVerdict,
    NodeReport,
    one_line,
    run_checks,
    write_rank_report,
)
from pipeline.health.config import HealthConfig, OperationName
from pipeline.parallel.process_group import host_group, open_device, open_world_group
from pipeline.parallel.world import World

# The tensor operations that our models use. Each is compared with the same operation in float64 on the host.

ROWS, WIDTH, TABLE = 128, 256, 512  # small sizes are sufficient to check correctness
Tensors = tuple[Tensor, ...]
Inputs = Callable[[torch.Generator], Tensors]


@dataclass(frozen=True)
class Operation:
    """A tensor operation to check. The tolerance is relative to the largest value of the reference result."""

    name: OperationName
    inputs: Inputs
    compute: Callable[..., Tensors]
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4


def _normal(*shapes: tuple[int, ...]) -> Inputs:
    return lambda generator: tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _embedding_inputs(generator: torch.Generator) -> Tensors:
    ids = torch.randint(0, TABLE, (ROWS,), generator=generator, dtype=torch.int32)
    table, direction = _normal((TABLE, WIDTH), (ROWS, WIDTH))(generator)
    return table, ids, direction


def _embedding(table: Tensor, ids: Tensor, direction: Tensor) -> Tensors:
    """Look up rows of a table. Also returns the gradient of the table, which is a scatter with duplicate rows."""
    table = table.detach().requires_grad_()
    rows = F.embedding(ids, table)
    (gradient,) = torch.autograd.grad((rows * direction).sum(), [table])
    return rows.detach(), gradient


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    return (torch.softmax(query @ key.transpose(0, 1) * WIDTH**-0.5, dim=-1) @ value,)


def _optimizer_step(weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor) -> Tensors:
    """Compute an AdamW step (Loshchilov and Hutter, 2019) without bias correction."""
    average = 0.9 * average + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient * gradient
    return weight * 0.99 - 1e-3 * average / (torch.sqrt(square) + 1e-8), average, square


_ONE, _FACTORS, _TRIPLE = _normal((ROWS, WIDTH)), _normal((ROWS, WIDTH), (WIDTH, WIDTH)), _normal(*[(ROWS, WIDTH)] * 3)
_SCALED = _normal((ROWS, WIDTH), (WIDTH,), (WIDTH,))

# The tolerances allow for the relative error of fp32 sums of a few hundred products, and of bf16 with 8 bits of
# mantissa. They include a margin, because hardware may split fp32 products. Nevertheless, the error caused by a flipped
# significant bit is far larger.
OPERATIONS = (
    Operation("matmul fp32", _FACTORS, lambda left, right: (left @ right,)),
    Operation("matmul bf16", _FACTORS, lambda left, right: (left @ right,), torch.bfloat16, 2e-2),
    Operation("attention fp32", _TRIPLE, _attention),
    Operation("attention bf16", _TRIPLE, _attention, torch.bfloat16, 4e-2),
    Operation("layer norm", _SCALED, lambda values, weight, bias: (F.layer_norm(values, (WIDTH,), weight, bias),)),
    Operation("softmax", _ONE, lambda values: (torch.softmax(values, dim=1), torch.log_softmax(values, dim=1))),
    Operation("gelu", _ONE, lambda values: (F.gelu(values),), tolerance=1e-3),
    Operation("embedding", _embedding_inputs, _embedding),
    Operation("reductions", _ONE, lambda x: (x.sum(dim=0), x.mean(dim=1), x.amax(dim=1), (x * x).sum())),
    Operation(
        "optimizer step",
        lambda generator: (*_normal(*[(WIDTH,)] * 3)(generator), torch.rand(WIDTH, generator=generator) + 0.5),
        _optimizer_step,
    ),
)


def reference(operation: Operation, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute an operation on the host in float64, using inputs that are rounded to the operation's dtype."""
    exact = tuple(value.to(operation.dtype).double() if value.is_floating_point() else value for value in inputs)
    return tuple(tensor.detach() for tensor in operation.compute(*exact))


def max_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|, or infinity if a value is not finite."""
    actual = actual.double()
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def check_operations(
    backend: Backend,
    *,
    seed: int,
    repeats: int,
    stop: StopSignal,
    tolerances: Mapping[OperationName, float] = MappingProxyType({}),
) -> CheckResult:
    """Run every operation `repeats` times, and verify the results.

    The results must be close to those in float64 and bitwise identical in all repeats. `tolerances` overrides the
    default tolerances.
    """
    figures: dict[str, float | int | str] = {}
    faults: list[str] = []
    for number, operation in enumerate(OPERATIONS):
        stop.raise_if_set("checking tensor operations")
        inputs = operation.inputs(torch.Generator().manual_seed(seed + number))
        expected = reference(operation, inputs)
        with _full_precision():
            runs = [_on_device(backend, operation, inputs) for _ in range(repeats)]
        error = max(max_relative_error(*pair) for pair in zip(runs[0], expected, strict=True))
        figures[f"{operation.name.replace(' ', '_')}_error"] = float(f"{error:.3g}")
        tolerance = tolerances.get(operation.name, operation.tolerance)
        if math.isinf(error):
            faults.append(f"{operation.name}: a value is not finite")
        elif error > tolerance:
            faults.append(f"{operation.name}: relative error {error:.2g}, expected at most {tolerance:g}")
        elif not all(torch.equal(*pair) for run in runs[1:] for pair in zip(runs[0], run, strict=True)):
            faults.append(f"{operation.name}: two runs with the same inputs have different results")
    if not faults:
        return CheckResult(OPERATIONS_CHECK, HealthVerdict.PASS, figures=figures)
    advice = f"{USE_ANOTHER_MACHINE} (if all machines have the same error: --health.tolerances)"
    expected_text = "results that are close to float64 and bitwise identical in each run"
    return CheckResult(OPERATIONS_CHECK, HealthVerdict.RETRY, "; ".join(faults), expected_text, advice, figures)


CHUNK_BYTES = 64 * 2**20
PATTERNS = (0x55555555, -0x55555556, 0)  # alternating bits, their complement, zeros


def check_memory(backend: Backend, *, sweep_bytes: int, stop: StopSignal) -> CheckResult:
    """Write patterns to `sweep_bytes` of device memory, and verify that they can be read again unchanged."""
    figures = {"swept_bytes": sweep_bytes}
    count = max(1, sweep_bytes // CHUNK_BYTES)
    for pattern in PATTERNS:
        chunks = []
        for index in range(count):
            stop.raise_if_set("sweeping device memory")
            # The pattern is different in each chunk, so that chunks which alias each other are also detected.
            chunks.append(torch.full((CHUNK_BYTES // 4,), pattern ^ index, dtype=torch.int32).to(backend.device))
        backend.synchronise()
        for index, chunk in enumerate(chunks):
            stop.raise_if_set("sweeping device memory")
            (values,) = backend.to_host([chunk])
            if wrong := int((values != (pattern ^ index)).sum()):
                seen = f"{wrong} words of chunk {index} of {count} ({format_bytes(CHUNK_BYTES)} each) changed"
                expected = f"the written pattern {pattern & 0xFFFFFFFF:#010x} ^ {index}"
                return CheckResult("device memory", HealthVerdict.RETRY, seen, expected, USE_ANOTHER_MACHINE, figures)
        del chunks, chunk
    return CheckResult("device memory", HealthVerdict.PASS, figures=figures)


BURN_WIDTH, BURN_DEPTH = 1024, 8


def check_burn(
    backend: Backend, *, seconds: float, stop: StopSignal, clock: Callable[[], float] = time.monotonic
) -> CheckResult:
    """Multiply matrices for `seconds` to measure the speed of the core.

    `check.add_slow_ranks` compares the result with those of the other ranks.
    """
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(BURN_WIDTH, BURN_WIDTH, generator=generator) / BURN_WIDTH**0.5).to(backend.device)
    values = torch.randn(BURN_WIDTH, BURN_WIDTH, generator=generator).to(backend.device)
    times: list[float] = []
    _round(backend, values, weight)  # the first round may compile a graph
    end = clock() + seconds
    while clock() < end or len(times) < 3:
        stop.raise_if_set("measuring the speed of a core")
        started = clock()
        _round(backend, values, weight)
        times.append(clock() - started)
    tflops = 2.0 * BURN_WIDTH**3 * BURN_DEPTH / min(times) / 1e12
    return CheckResult(BURN, HealthVerdict.PASS, figures={"rounds": len(times), ROUND: min(times), "tflops": tflops})


def _round(backend: Backend, values: Tensor, weight: Tensor) -> None:
    with torch.no_grad():
        for _ in range(BURN_DEPTH):
            values = values @ weight
        total = values.sum().reshape(1)
    backend.step_boundary([total])
    backend.to_host([total])


def _on_device(backend: Backend, operation: Operation, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    on_device = [
        (value.to(operation.dtype) if value.is_floating_point() else value).to(backend.device) for value in inputs
    ]
    with torch.autograd.set_multithreading_enabled(False):
        results = [tensor.detach() for tensor in operation.compute(*on_device)]
    backend.step_boundary(results)
    return backend.to_host(results)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Disable TF32, which may be enabled for the process but has only 10 bits of mantissa."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


_ASSERT = "device-side assert triggered"
"""CUDA reports this for bugs such as an index out of range. The process cannot use the device afterwards."""


def diagnose_device_error(
    error: RuntimeError, backend: Backend, config: HealthConfig, *, stop: StopSignal
) -> BaseException:
    """Determine the cause of a device error and return the exception to raise.

    A known Neuron error message determines the exception. Otherwise, the operations of the device are checked. If they
    fail, the result is a TransientError, because the job may succeed on a different machine. If they pass, the result
    is `error` itself. Raises Preempted.
    """
    diagnosed = device_error(str(error))
    if diagnosed is not None:
        return diagnosed
    if _ASSERT in str(error):
        return error

    def operations(ctx: CheckContext) -> CheckResult:
        ctx.doing = "checking tensor operations after a device error"
        with device_guard(backend.device):
            return check_operations(backend, seed=1, repeats=1, stop=ctx.stop, tolerances=config.tolerances)

    limit_s = config.device_limit_s(on_neuron=backend.is_neuron)
    check = Check(OPERATIONS_CHECK, operations, time_limit_s=limit_s)
    report = run_checks([check], config, node_rank=0, host="this rank", stop=stop)
    if report.verdict < HealthVerdict.RETRY:
        return error
    (result,) = report.results
    return TransientError(
        f"{first_line(error)} (and the device fails its health check: {result.seen})",
        expected="a working device",
        next_command="run trnpipe health on that machine, or retry the job on a different one",
    )


# Check the collectives, and assemble all checks of a rank.

DEVICE, COLLECTIVES = "device", "collectives"
SIZES_BYTES = (8, 64 * 2**10, 4 * 2**20)
"""Sizes of the largest buffer of a rank. The smallest one measures the latency, the largest one the bandwidth."""
REPEATS = 2  # the first call with each shape may compile a graph
MIB = 2**20
LINK_FACTORS = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1}
"""Number of bytes that each collective sends over the slowest link, per byte of the largest buffer. The factor of
(n - 1) / n for n ranks is not included."""


def rank_values(source: int, repeat: int, count: int) -> Tensor:
    """Return the input of rank `source` as fp32 [count].

    The values are integers below 2^12, so that their sums are exact. They depend on the rank, the repeat and the
    position, so that a wrong rank, a stale buffer or a swapped chunk is detected.
    """
    return ((torch.arange(count, dtype=torch.int64) * 7 + 997 * source + 101 * repeat) % 4093).to(torch.float32)


def expected_result(name: str, world: World, repeat: int, count: int) -> Tensor:
    """Compute the expected result of a collective over `rank_values` on the host."""
    sources = range(world.world_size)
    if name == "all-gather":
        return torch.cat([rank_values(source, repeat, count) for source in sources])
    total = torch.zeros(count)
    for source in sources:  # do not keep all inputs, because together they may exceed the host memory
        total += rank_values(source, repeat, count)
    return total if name == "all-reduce" else total.reshape(world.world_size, -1)[world.rank]


def check_collectives(
    backend: Backend,
    world: World,
    *,
    limit_s: float,
    ctx: CheckContext,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> CheckResult:
    """Run every collective with every size, and verify the results.

    The process group must already be open. If a rank gets wrong results, it still runs all remaining collectives, so
    that other ranks do not wait for it. The bandwidths among the figures include copies from and to the host, so they
    are far below that of the bus, which nccom-test measures.
    """
    figures: dict[str, float | int | str] = {}
    fault, num, repeat = "", world.world_size, 0
    ranks = RankGroup(world.rank, (tuple(range(num)),))
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "all-gather": backend.all_gather,
        "all-reduce": lambda tensor: backend.all_reduce(tensor, ranks),
        "reduce-scatter": lambda tensor: backend.reduce_scatter(tensor, ranks),
    }
    for name, factor in LINK_FACTORS.items():
        for size in sizes_bytes:
            chunks = num if name == "all-gather" else 1  # the result of an all-gather has a chunk for each rank
            count = num * max(1, size // 4 // chunks // num)
            best_s = float("inf")
            for _ in range(REPEATS):
                repeat += 1
                ctx.stop.raise_if_set("checking collectives")
                ctx.doing = f"in {name} of {size} bytes"
                expected = expected_result(name, world, repeat, count)
                try:
                    dist.monitored_barrier(host_group(), timedelta(seconds=limit_s), wait_all_ranks=True)
                    started = time.monotonic()
                    with device_guard(backend.device):
                        tensor = rank_values(world.rank, repeat, count).to(backend.device)
                        (result,) = backend.to_host([run[name](tensor)])
                except RuntimeError as error:  # a timeout, or a rank that has exited
                    ctx.stop.raise_if_set("checking collectives")
                    seen = f"{ctx.doing}: {one_line(str(error))[:300]}"
                    expected_text = "all ranks take part in every collective"
                    advice = "check the last log lines of these ranks, or retry the job on a different machine"
                    return CheckResult(COLLECTIVES, HealthVerdict.RETRY, seen, expected_text, advice, figures)
                best_s = min(best_s, time.monotonic() - started)
                if not fault and not torch.equal(result, expected):
                    wrong = (result != expected).nonzero().reshape(-1)
                    first = int(wrong[0])
                    source = f" (from rank {first // count})" if name == "all-gather" else ""
                    fault = (
                        f"{len(wrong)} of {len(expected)} numbers are wrong {ctx.doing}, the first at {first}{source}: "
                        f"{float(result[first]):g} instead of {float(expected[first]):g}"
                    )
            rate = factor * (num - 1) / num * 4 * count * chunks / best_s
            figures[f"{name}_{size}_bytes_gb_s"] = float(f"{rate / 1e9:.3g}")
    if fault:
        expected_text = "the result computed on the host"
        return CheckResult(COLLECTIVES, HealthVerdict.RETRY, fault, expected_text, USE_ANOTHER_MACHINE, figures)
    return CheckResult(COLLECTIVES, HealthVerdict.PASS, figures=figures)


def rank_checks(name: str, world: World, config: HealthConfig, env: Mapping[str, str], seed: int) -> tuple[Check, ...]:
    """Return the checks of a rank in order. The first one opens the device. `seed` must be the same on all ranks."""
    opened: list[Backend] = []
    limit_s = config.device_limit_s(on_neuron=on_neuron(name, env))

    def device(ctx: CheckContext) -> CheckResult:
        if world.world_size > 1:
            ctx.doing = "joining the other ranks"
            open_world_group(process_group(name), limit_s)
        ctx.doing = "opening the device"
        backend = open_device(name, world)
        opened.append(backend)
        figures = {SHARED: int(backend.shares_host_memory)}
        return CheckResult(DEVICE, HealthVerdict.PASS, backend.device_name(), figures=figures)

    def core_check(title: str, cost_s: float, check: Callable[..., CheckResult]) -> Check:
        def run(ctx: CheckContext) -> Iterator[CheckResult]:
            ctx.doing = f"checking {title} on the device"
            for backend in opened:
                with device_guard(backend.device):
                    yield check(backend, stop=ctx.stop)

        return Check(title, run, "cores", time_limit_s=limit_s, cost_s=cost_s)

    def memory(backend: Backend, *, stop: StopSignal) -> CheckResult:
        # Sweep less memory on the host, because it is shared with other processes and the check needs a second copy.
        return check_memory(backend, sweep_bytes=(64 if backend.shares_host_memory else 256) * MIB, stop=stop)

    def burn(backend: Backend, *, stop: StopSignal) -> CheckResult:
        return check_burn(backend, seconds=0.3 if backend.shares_host_memory else 3.0, stop=stop)

    def collectives(ctx: CheckContext) -> Iterator[CheckResult]:
        for backend in opened:
            yield check_collectives(backend, world, limit_s=limit_s, ctx=ctx)
            if process_group(name):
                dist.destroy_process_group()  # otherwise, NCCL warns about a leak at exit

    operations = partial(check_operations, seed=seed, repeats=2, tolerances=config.tolerances)
    checks = (
        Check(DEVICE, device, time_limit_s=2 * limit_s, cost_s=0.0),
        core_check(OPERATIONS_CHECK, 1.0, operations),
        core_check("device memory", 2.0, memory),
        core_check(BURN, 3.0, burn),
    )
    if world.world_size == 1:
        return checks
    return (*checks, Check(COLLECTIVES, collectives, "collectives", time_limit_s=3 * limit_s, cost_s=4.0))


def report_rank(checks: Sequence[Check], config: HealthConfig, rank: int, folder: Path, stop: StopSignal) -> NodeReport:
    """Run the checks of a rank, and update its report in `folder` after each result. Raises Preempted."""
    report = NodeReport(rank, f"rank {rank}", ())

    def add(result: CheckResult) -> None:
        nonlocal report
        report = replace(report, results=(*report.results, result))
        write_rank_report(folder, report, is_finished=False)

    try:
        run_checks(checks, config, node_rank=rank, host=report.host, stop=stop, on_result=add)
    finally:  # write the report even if the run is stopped. Otherwise, this rank would be reported as dead
        write_rank_report(folder, report, is_finished=True)
    return report
