"""The checks of a rank: is its core right, whole and as fast as the others, and do collectives with all others work.

Operations against float64, a memory sweep, a short burn; collectives under the process group's time limit. The
operations again after an error of the device in training: is it the machine, the settings, or a bug of ours?
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
    ELSEWHERE,
    OPERATIONS_CHECK,
    ROUND,
    SHARED,
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

# The tensor operations a model of ours uses, each with the same in float64 on the host to compare with.

ROWS, WIDTH, TABLE = 128, 256, 512  # small: what is looked for is a wrong core, not a slow one
Tensors = tuple[Tensor, ...]
Inputs = Callable[[torch.Generator], Tensors]


@dataclass(frozen=True)
class Operation:
    """`compute(*inputs)` gives the tensors to compare; `tolerance` is relative to the largest reference value."""

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
    """Rows of a table, and the gradient of the table: a scatter with rows that meet."""
    table = table.detach().requires_grad_()
    rows = F.embedding(ids, table)
    (gradient,) = torch.autograd.grad((rows * direction).sum(), [table])
    return rows.detach(), gradient


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    return (torch.softmax(query @ key.transpose(0, 1) * WIDTH**-0.5, dim=-1) @ value,)


def _optimizer_step(weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor) -> Tensors:
    """AdamW (Loshchilov and Hutter 2019) without bias correction."""
    average = 0.9 * average + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient * gradient
    return weight * 0.99 - 1e-3 * average / (torch.sqrt(square) + 1e-8), average, square


_ONE, _FACTORS, _TRIPLE = _normal((ROWS, WIDTH)), _normal((ROWS, WIDTH), (WIDTH, WIDTH)), _normal(*[(ROWS, WIDTH)] * 3)
_SCALED = _normal((ROWS, WIDTH), (WIDTH,), (WIDTH,))

# Relative errors: fp32 sums of a few hundred products, and bf16 with 8 bits of mantissa. Hardware may multiply fp32 in
# pieces, so these leave room; a flipped bit of weight is far outside.
OPERATIONS = (
    Operation("matmul fp32", _FACTORS, lambda left, right: (left @ right,)),
    Operation("matmul bf16", _FACTORS, lambda left, right: (left @ right,), torch.bfloat16, 2e-2),
    Operation("attention fp32", _TRIPLE, _attention),
    Operation("attention bf16", _TRIPLE, _attention, torch.bfloat16, 4e-2),
    Operation("layer norm", _SCALED, lambda values, weight, bias: (F.layer_norm(values, (WIDTH,), weight, bias),)),
    Operation("softmax", _ONE, lambda values: (torch.softmax(values, dim=1), torch.log_softmax(values, dim=1))),
    Operation("gelu", _ONE, lambda values: (F.gelu(values),), tolerance=1e-3),
    Operation("embedding", _embedding_inputs, _embedding),
    Operation("reductions", _ONE, lambda one: (one.sum(dim=0), one.mean(dim=1), one.amax(dim=1), (one * one).sum())),
    Operation(
        "optimizer step",
        lambda generator: (*_normal(*[(WIDTH,)] * 3)(generator), torch.rand(WIDTH, generator=generator) + 0.5),
        _optimizer_step,
    ),
)


def reference(operation: Operation, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute on the host in float64, from the values the device gets (rounded to its dtype)."""
    exact = tuple(value.to(operation.dtype).double() if value.is_floating_point() else value for value in inputs)
    return tuple(tensor.detach() for tensor in operation.compute(*exact))


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected magnitude; infinite if a value is not finite."""
    found = found.double()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def check_operations(
    backend: Backend,
    *,
    seed: int,
    repeats: int,
    stop: StopSignal,
    tolerances: Mapping[OperationName, float] = MappingProxyType({}),
) -> CheckResult:
    """Compare every operation on random inputs with float64, within its tolerance, and its bits in each repeat.

    `tolerances`: in place of the usual ones.
    """
    figures: dict[str, float | int | str] = {}
    faults: list[str] = []
    for number, operation in enumerate(OPERATIONS):
        stop.raise_if_set("checking tensor operations")
        inputs = operation.inputs(torch.Generator().manual_seed(seed + number))
        expected = reference(operation, inputs)
        with _full_precision():
            runs = [_on_device(backend, operation, inputs) for _ in range(repeats)]
        error = max(worst_error(found, right) for found, right in zip(runs[0], expected, strict=True))
        figures[f"{operation.name.replace(' ', '_')}_error"] = float(f"{error:.3g}")
        tolerance = tolerances.get(operation.name, operation.tolerance)
        if math.isinf(error):
            faults.append(f"{operation.name}: a value that is not finite")
        elif error > tolerance:
            faults.append(f"{operation.name}: relative error {error:.2g}, at most {tolerance:g} is expected")
        elif not all(torch.equal(one, two) for run in runs[1:] for one, two in zip(runs[0], run, strict=True)):
            faults.append(f"{operation.name}: two runs on equal inputs differ")
    if not faults:
        return CheckResult(OPERATIONS_CHECK, HealthVerdict.PASS, figures=figures)
    do = f"{ELSEWHERE}; an error that all machines have alike: --health.tolerances"
    expected_text = "float64 within the tolerance of each operation, and equal bits in each run"
    return CheckResult(OPERATIONS_CHECK, HealthVerdict.RETRY, "; ".join(faults), expected_text, do, figures)


CHUNK_BYTES = 64 * 2**20
PATTERNS = (0x55555555, -0x55555556, 0)  # alternating bits, their complement, zeros


def check_memory(backend: Backend, *, sweep_bytes: int, stop: StopSignal) -> CheckResult:
    """Write patterns to device memory, all of it at once, and read them back."""
    figures = {"swept_bytes": sweep_bytes}
    count = max(1, sweep_bytes // CHUNK_BYTES)
    for pattern in PATTERNS:
        chunks = []
        for index in range(count):
            stop.raise_if_set("sweeping device memory")
            # Each chunk differs: a chunk that aliases another is found, too.
            chunks.append(torch.full((CHUNK_BYTES // 4,), pattern ^ index, dtype=torch.int32).to(backend.device))
        backend.synchronise()
        for index, chunk in enumerate(chunks):
            stop.raise_if_set("sweeping device memory")
            (found,) = backend.to_host([chunk])
            if wrong := int((found != (pattern ^ index)).sum()):
                seen = f"{wrong} words of chunk {index} of {count} ({format_bytes(CHUNK_BYTES)} each) changed"
                expected = f"what was written, {pattern & 0xFFFFFFFF:#010x} ^ {index}"
                return CheckResult("device memory", HealthVerdict.RETRY, seen, expected, ELSEWHERE, figures)
        del chunks, chunk
    return CheckResult("device memory", HealthVerdict.PASS, figures=figures)


BURN_WIDTH, BURN_DEPTH = 1024, 8


def check_burn(
    backend: Backend, *, seconds: float, stop: StopSignal, clock: Callable[[], float] = time.monotonic
) -> CheckResult:
    """Multiply matrices for a while. The figures are compared with those of other ranks (nodes.py)."""
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(BURN_WIDTH, BURN_WIDTH, generator=generator) / BURN_WIDTH**0.5).to(backend.device)
    values = torch.randn(BURN_WIDTH, BURN_WIDTH, generator=generator).to(backend.device)
    times: list[float] = []
    _round(backend, values, weight)  # compiles
    end = clock() + seconds
    while clock() < end or len(times) < 3:
        stop.raise_if_set("burning in a core")
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
    placed = [
        (value.to(operation.dtype) if value.is_floating_point() else value).to(backend.device) for value in inputs
    ]
    with torch.autograd.set_multithreading_enabled(False):
        found = [tensor.detach() for tensor in operation.compute(*placed)]
    backend.step_boundary(found)
    return backend.to_host(found)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of fp32 in fp32: an image may ask for TF32, with 10 bits of mantissa, for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_ASSERT = "device-side assert triggered"
"""Of CUDA, for an index beyond a table and the like: a bug, after which the process cannot use the device any more."""


def diagnose_device_error(
    error: RuntimeError, backend: Backend, config: HealthConfig, *, stop: StopSignal
) -> BaseException:
    """Return what to raise for `error`: that of the table of Neuron errors, else TransientError on a device that fails
    the short checks, else the error itself. Raises Preempted when stopped.
    """
    known = device_error(str(error))
    if known is not None:
        return known
    if _ASSERT in str(error):
        return error

    def operations(ctx: CheckContext) -> CheckResult:
        ctx.doing = "checking tensor operations after an error of the device"
        with device_guard(backend.device):
            return check_operations(backend, seed=1, repeats=1, stop=ctx.stop, tolerances=config.tolerances)

    limit_s = config.device_limit_s(on_neuron=backend.is_neuron)
    check = Check(OPERATIONS_CHECK, operations, time_limit_s=limit_s)
    report = run_checks([check], config, node_rank=0, host="this rank", stop=stop)
    if report.verdict < HealthVerdict.RETRY:
        return error
    (result,) = report.results
    return TransientError(
        f"{first_line(error)}; and the device fails its check: {result.seen}",
        expected="a device that computes",
        next_command="trnpipe health on that machine; the job itself may be retried elsewhere",
    )


# Collectives, and all checks of a rank.

DEVICE, COLLECTIVES = "device", "collectives"
SIZES_BYTES = (8, 64 * 2**10, 4 * 2**20)
"""Of the largest buffer of a rank: latency, the middle, and enough to measure bandwidth on any link."""
TURNS = 2  # the first call of a shape may have to be compiled
MIB = 2**20
LINK_SHARES = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1}
"""The collectives, with the bytes over the slowest link for each byte of the largest buffer, times n / (n - 1)."""


def contents(source: int, turn: int, count: int) -> Tensor:
    """Return what rank `source` gives, fp32 [count]: whole numbers below 2^12, so that sums are exact.

    It differs with source and turn, and along the tensor: a wrong rank, a stale buffer or a swapped chunk is seen.
    """
    return ((torch.arange(count, dtype=torch.int64) * 7 + 997 * source + 101 * turn) % 4093).to(torch.float32)


def expected_of(name: str, world: World, turn: int, count: int) -> Tensor:
    """Return the result of a collective over `contents`, computed on the host."""
    sources = range(world.world_size)
    if name == "all-gather":
        return torch.cat([contents(source, turn, count) for source in sources])
    total = torch.zeros(count)
    for source in sources:  # one by one: all of a large size at once fill a host with many ranks
        total += contents(source, turn, count)
    return total if name == "all-reduce" else total.reshape(world.world_size, -1)[world.rank]


def check_collectives(
    backend: Backend,
    world: World,
    *,
    limit_s: float,
    ctx: CheckContext,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    minimum_gb_s: float = 0.0,
) -> CheckResult:
    """Run every collective at every size; `minimum_gb_s`: bus bandwidth of the largest all-reduce.

    The process group must be open. A rank with wrong numbers goes on to the end, so that no other rank waits for it.
    """
    figures: dict[str, float | int | str] = {}
    fault, num, turn = "", world.world_size, 0
    ranks = RankGroup(world.rank, (tuple(range(num)),))
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "all-gather": backend.all_gather,
        "all-reduce": lambda tensor: backend.all_reduce(tensor, ranks),
        "reduce-scatter": lambda tensor: backend.reduce_scatter(tensor, ranks),
    }
    for name, share in LINK_SHARES.items():
        for size in sizes_bytes:
            chunks = num if name == "all-gather" else 1  # its result holds a chunk for each rank
            count = num * max(1, size // 4 // chunks // num)
            best_s = float("inf")
            for _ in range(TURNS):
                turn += 1
                ctx.stop.raise_if_set("checking collectives")
                ctx.doing = f"in {name} of {size} bytes"
                expected = expected_of(name, world, turn, count)
                try:
                    dist.monitored_barrier(host_group(), timedelta(seconds=limit_s), wait_all_ranks=True)
                    started = time.monotonic()
                    with device_guard(backend.device):
                        tensor = contents(world.rank, turn, count).to(backend.device)
                        (found,) = backend.to_host([run[name](tensor)])
                except RuntimeError as error:  # time-out, lost rank
                    ctx.stop.raise_if_set("checking collectives")
                    seen = f"{ctx.doing}: {one_line(str(error))[:300]}"
                    do = "look at the last lines of the ranks that are named; this job elsewhere"
                    return CheckResult(
                        COLLECTIVES, HealthVerdict.RETRY, seen, "every rank in every collective", do, figures
                    )
                best_s = min(best_s, time.monotonic() - started)
                if not fault and not torch.equal(found, expected):
                    wrong = (found != expected).nonzero().reshape(-1)
                    first = int(wrong[0])
                    source = f" (from rank {first // count})" if name == "all-gather" else ""
                    fault = (
                        f"{len(wrong)} wrong numbers of {len(expected)} {ctx.doing}, the first at {first}{source}: "
                        f"{float(found[first]):g} for {float(expected[first]):g}"
                    )
            rate = share * (num - 1) / num * 4 * count * chunks / best_s
            figures[f"{name}_{size}_bytes_gb_s"] = float(f"{rate / 1e9:.3g}")
    if fault:
        return CheckResult(COLLECTIVES, HealthVerdict.RETRY, fault, "the contents of every rank", ELSEWHERE, figures)
    reached = float(figures[f"all-reduce_{sizes_bytes[-1]}_bytes_gb_s"])
    if reached < minimum_gb_s:
        seen, wanted = f"all-reduce reaches {reached:.3g} GB/s bus bandwidth", f"at least {minimum_gb_s:g} GB/s"
        return CheckResult(COLLECTIVES, HealthVerdict.RETRY, seen, wanted, "this job elsewhere", figures)
    return CheckResult(COLLECTIVES, HealthVerdict.PASS, figures=figures)


def rank_checks(name: str, world: World, config: HealthConfig, env: Mapping[str, str], seed: int) -> tuple[Check, ...]:
    """Return the checks of one rank, in order, on a device of backend `name`, which the first one opens.

    `seed`: the same on all ranks.
    """
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

    def on_device(what: str, cost_s: float, check: Callable[..., CheckResult]) -> Check:
        def run(ctx: CheckContext) -> Iterator[CheckResult]:
            ctx.doing = f"checking {what} on the device"
            for backend in opened:
                with device_guard(backend.device):
                    yield check(backend, stop=ctx.stop)

        return Check(what, run, "cores", time_limit_s=limit_s, cost_s=cost_s)

    def memory(backend: Backend, *, stop: StopSignal) -> CheckResult:
        # A host's own memory holds what is written twice, and belongs to others, too.
        return check_memory(backend, sweep_bytes=(64 if backend.shares_host_memory else 256) * MIB, stop=stop)

    def burn(backend: Backend, *, stop: StopSignal) -> CheckResult:
        return check_burn(backend, seconds=0.3 if backend.shares_host_memory else 3.0, stop=stop)

    def collectives(ctx: CheckContext) -> Iterator[CheckResult]:
        for backend in opened:
            yield check_collectives(backend, world, limit_s=limit_s, ctx=ctx, minimum_gb_s=config.min_bus_gb_s)
            if process_group(name):
                dist.destroy_process_group()  # nccl warns of a leak if a process ends without

    operations = partial(check_operations, seed=seed, repeats=2, tolerances=config.tolerances)
    alone = (
        Check(DEVICE, device, time_limit_s=2 * limit_s, cost_s=0.0),
        on_device(OPERATIONS_CHECK, 1.0, operations),
        on_device("device memory", 2.0, memory),
        on_device(BURN, 3.0, burn),
    )
    if world.world_size == 1:
        return alone
    return (*alone, Check(COLLECTIVES, collectives, "collectives", time_limit_s=3 * limit_s, cost_s=4.0))


def report_rank(checks: Sequence[Check], config: HealthConfig, rank: int, folder: Path, stop: StopSignal) -> NodeReport:
    """Run the checks of a rank and leave its report in `folder`, also after each check. Raises Preempted."""
    so_far = NodeReport(rank, f"rank {rank}", ())

    def seen(result: CheckResult) -> None:
        nonlocal so_far
        so_far = replace(so_far, results=(*so_far.results, result))
        write_rank_report(folder, so_far, is_finished=False)

    try:
        run_checks(checks, config, node_rank=rank, host=so_far.host, stop=stop, seen=seen)
    finally:  # when stopped, too: this rank has not died
        write_rank_report(folder, so_far, is_finished=True)
    return so_far
