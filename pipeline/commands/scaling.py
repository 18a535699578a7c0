"""`trnpipe scaling`: memory of a plan, its step over nodes, the cost of an epoch, and the plan that suits better.

All of it is modelled but two things: memory, where a device runs modules, is tracked through the modules themselves;
jitter, where the cycle has trained, is that of its own steps.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.commands import ToolCall
from pipeline.context import cycle_name
from pipeline.core.batch_order import RankShare
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.fabrics import FABRICS, Fabric
from pipeline.core.footprint import Footprint
from pipeline.core.format import aligned, format_bytes, format_count, format_duration, format_share, usd
from pipeline.core.layout import Layout, layout_of
from pipeline.core.machines import price_usd_per_hour
from pipeline.core.progress import Say
from pipeline.core.scaling import (
    NODES,
    RESERVE,
    Candidate,
    Scaled,
    Spread,
    Transformer,
    Work,
    candidates,
    copy_bytes,
    scaled,
    steady_share,
)
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.config import Plan
from pipeline.parallel.memory import Memory, track_relevance
from pipeline.registry.checkpoints import locate, read_checkpoint
from pipeline.settings import Settings
from pipeline.stages.estimates import estimates
from pipeline.stages.inputs import Shapes, expected_shapes
from pipeline.telemetry.events import EventName, read_events
from pipeline.train.config import TrainPlan

EPOCH_SAMPLES = 1_000_000


@dataclass(frozen=True)
class Answer:
    machine: str
    plan: Plan
    samples: int
    """Of a rank and step, and `tokens` of each row."""
    tokens: int
    memory: Mapping[str, int]
    """Bytes of one rank, by use."""
    memory_source: str
    jitter: float
    jitter_source: str
    rows: list[Scaled]
    choice: Candidate
    choice_nodes: int


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Answer for these settings or a checkpoint's model. Raises ConfigError, CheckpointError, Preempted."""
    if "--decisions" in call.switches:
        for line in decision_table():
            say(line)
        return EXIT_OK
    name = call.options.get("--fabric", settings.estimate.instance)
    if name not in FABRICS:
        raise ConfigError(f"fabric {name!r}", expected=f"one of {', '.join(FABRICS)}", next_command="--fabric NAME")
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    plan, fabric = settings.train.parallel, FABRICS[name]
    if (plan.shard not in fabric.shards and plan.shard_degree != 1) or plan.tensor_degree > fabric.max_tensor:
        raise ConfigError(
            f"the plan has shard {plan.shard} and tensor_degree {plan.tensor_degree} on {name}",
            expected=f"shard {' or '.join(fabric.shards)}, tensor_degree up to {fabric.max_tensor}",
            next_command="--train.parallel.shard-degree 1 --train.parallel.tensor-degree 1, or another --fabric",
        )
    shapes = expected_shapes(settings)
    for named in call.arguments:
        state = read_checkpoint(*locate(named, settings, workspace)).state
        settings, shapes = settings.model_copy(update={"model": state.model}), Shapes(state.inputs, shapes.buckets)
    answer = _answer(settings, shapes, plan, fabric, workspace, call.number("--nodes", 1), _seconds(call))
    if "--json" in call.switches:
        say(json.dumps(_plain(answer), indent=1))
        return EXIT_OK
    price = price_usd_per_hour(name, settings.estimate.price_usd_per_hour)
    price = fabric.usd_per_hour if price is None else price
    for line in _lines(answer, fabric, price, call.number("--samples", EPOCH_SAMPLES)):
        say(line)
    return EXIT_OK


def _seconds(call: ToolCall) -> float:
    text = call.options.get("--fixed-s", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"--fixed-s {text}", expected="seconds, 0 or more")
    return seconds


def _answer(
    settings: Settings, shapes: Shapes, plan: Plan, fabric: Fabric, workspace: Storage, nodes: int, fixed_s: float
) -> Answer:
    train, size, samples = settings.train, settings.model.encoder, settings.train.micro_batch_size
    node = {
        "train": train.model_copy(update={"global_batch_size": samples * fabric.ranks, "parallel": TrainPlan()}),
        "estimate": settings.estimate.model_copy(update={"instance": "trn1.32xlarge"}),  # any: only sizes are read
    }
    again = {**node, "train": node["train"].model_copy(update={"parallel": TrainPlan(recompute="units")})}
    one_rank = RankShare(0, fabric.ranks, 1)
    by_length = [estimates(settings.model_copy(update=one), shapes, one_rank) for one in (node, again)]
    tokens, longest = max(by_length[0].items())
    sizes = {recompute: found[tokens].footprint for recompute, found in zip((False, True), by_length, strict=True)}
    low = plan.precision == "bf16" or train.precision != "fp32"
    peak = (fabric.tflops_bf16 if low else fabric.tflops_fp32) * 1e12 * settings.estimate.mfu
    work = Work(
        parameters=longest.footprint.master_bytes // 4,
        layers=size.num_layers,
        micro_s=longest.flops / peak,
        fixed_s=fixed_s,
        exchange_bytes=samples // train.candidates_per_query * tokens * size.hidden_size * (2 if low else 4),
        gather_bytes=2 if low else 4,
    )
    jitter, jitter_source = _jitter(workspace, cycle_name(settings))
    alone = layout_of(0, fabric.ranks, shard_degree=1, tensor_degree=plan.tensor_degree)
    in_modules = plan.tensor_degree > 1 or plan.offload_horizon > 0 or plan.shards_parameters
    spread = Spread(alone, plan.shard, plan.recompute == "units", overlaps=in_modules)
    table = scaled(work, spread, fabric, shard_degree=plan.shard_degree, jitter=jitter)
    if not table:
        raise ConfigError(
            f"shard_degree {plan.shard_degree}, tensor_degree {plan.tensor_degree} over nodes of {fabric.ranks} ranks",
            expected=f"degrees that divide the ranks of {', '.join(map(str, NODES[:-1]))} or {NODES[-1]} nodes",
        )

    def tracked(ranks: int, **update: int | str) -> Memory:
        update = {"precision": "bf16" if low else "fp32", **update}
        slots, one = train.candidates_per_query, plan.model_copy(update=update)
        of_rank = {"groups": samples // slots, "slots": slots, "tokens": tokens}
        return track_relevance(settings.model, shapes.spec, train.loss, one, ranks, **of_rank)

    if "all" in fabric.shards:
        whole: dict[str, int | str] = {} if in_modules else {"shard_degree": 1, "shard": "all"}
        asked = tracked(table[0].nodes * fabric.ranks, **whole)
        memory, source = asked.by_use(), "tracked on the modules"
        memory["peak"] = asked.offloaded(plan.offload_horizon)
        if not in_modules:
            memory |= _flat_states(work, table[0].layout)
            memory["peak"] += memory["parameters"] + memory["moments"] - asked.states
        node_wide: dict[str, int | str] = {"shard_degree": fabric.ranks, "shard": "all", "tensor_degree": 1}
        kinds = {False: "none", True: "units"}
        beside = {key: tracked(fabric.ranks, recompute=kind, **node_wide).beside for key, kind in kinds.items()}
    else:
        memory, beside = _of_flat_program(sizes, work, plan, table[0].layout)
        source = "from sizes, as trnpipe doctor"
    best = candidates(work, beside, fabric, nodes, jitter=jitter)[0]
    return Answer(fabric.name, plan, samples, tokens, memory, source, jitter, jitter_source, table, best, nodes)


def _flat_states(work: Work, layout: Layout) -> dict[str, int]:
    """Bytes of a rank of the flat program."""
    return {
        "parameters": 4 * work.parameters // layout.shard_size + copy_bytes(work, layout),
        "moments": 8 * work.parameters // layout.shard_size,
    }


def _of_flat_program(
    sizes: Mapping[bool, Footprint], work: Work, plan: Plan, layout: Layout
) -> tuple[dict[str, int], dict[bool, int]]:
    """(bytes by use under `plan`, what a step takes beside states and gradient), `sizes` and these by recomputation."""
    kept = {recompute: one.activation_bytes + one.workspace_bytes for recompute, one in sizes.items()}
    memory = _flat_states(work, layout) | {
        "gradients": sizes[False].gradient_bytes,
        "activations": kept[plan.recompute == "units"],
    }
    return memory | {"peak": sum(memory.values())}, kept


def _jitter(workspace: Storage, cycle: str) -> tuple[float, str]:
    """That of a cycle's own training, and where it is from. Each try's first interval has its compiles, and is left."""
    seconds: list[float] = []
    is_first, ranks = True, 1
    for event in read_events(workspace, f"cycles/{cycle}/events.jsonl"):
        if event["event"] == EventName.TRAIN_STARTED:
            is_first, ranks = True, int(event["world_size"])
        elif event["event"] == EventName.TRAIN_STEPS and event["tokens_per_s"] > 0:
            seconds += [] if is_first else [1 / event["tokens_per_s"]]
            is_first = False
    if len(seconds) < 3:
        return 0.0, f"not measured: cycle {cycle} has no run of four intervals (--cycle names another)"
    return steady_share(seconds), f"measured: {len(seconds)} intervals of cycle {cycle} on {ranks} ranks"


# What is shown.


def _lines(answer: Answer, fabric: Fabric, price_usd_per_hour: float | None, epoch: int) -> Iterator[str]:
    plan = answer.plan.model_dump(exclude_defaults=True)
    yield f"{fabric.name}: {fabric.ranks} ranks of {format_bytes(fabric.memory_bytes)} | plan {json.dumps(plan)}"
    yield f"a step: {answer.samples} samples a rank in rows of {answer.tokens} tokens"
    uses = " | ".join(f"{name} {format_bytes(size)}" for name, size in answer.memory.items())
    verdict = "fits" if answer.memory["peak"] <= (1 - RESERVE) * fabric.memory_bytes else "DOES NOT FIT"
    yield f"memory of a rank, nodes {answer.rows[0].nodes} ({answer.memory_source}): {uses} ({verdict})"
    yield f"jitter {format_share(answer.jitter)} ({answer.jitter_source})"
    yield "modelled, an upper bound; not measured:"
    rows = [["nodes", "step", "exposed", "weak", "samples/s", "strong", "epoch", "cost"]]
    for row in answer.rows:
        rate = answer.samples * row.nodes * fabric.ranks / answer.plan.tensor_degree / row.step.step_s
        hours = epoch / rate / 3600
        cost = None if price_usd_per_hour is None else hours * row.nodes * price_usd_per_hour
        rows.append(
            [
                str(row.nodes),
                f"{1e3 * row.step.step_s:.1f} ms",
                f"{1e3 * row.step.exposed_s:.1f} ms",
                format_share(row.weak_efficiency),
                format_count(rate),
                f"{row.strong_speedup:.2f}x",
                format_duration(hours * 3600),
                usd(cost),
            ]
        )
    yield from aligned(rows)
    yield f"best on {answer.choice_nodes} x {fabric.name}: {_plan_text(answer.choice)}"


def _plan_text(one: Candidate) -> str:
    """A candidate as the keys of a plan, with its memory."""
    place = one.spread.layout
    keys = [f"shard_degree {place.shard_size}"]
    keys += ["shard state"] if one.spread.shard == "state" and place.shard_size > 1 else []
    keys += [f"tensor_degree {place.tensor_size}"] if place.tensor_size > 1 else []
    keys += ["recompute units"] if one.spread.recompute else []
    return f"{', '.join(keys)} ({format_bytes(one.memory_bytes)})" if one.fits else "does not fit"


def _plain(answer: Answer) -> dict[str, Any]:
    found = asdict(answer) | {"plan": answer.plan.model_dump(), "choice": _plan_text(answer.choice)}
    return found | {"rows": [asdict(row) | {"step_s": row.step.step_s} for row in answer.rows]}


# Which plan for which model and fleet: the table of docs/parallel.md.

MODELS = (
    Transformer("small, 23 M", 23_000_000, 6, 384),
    Transformer("base, 110 M", 110_000_000, 12, 768),
    Transformer("large, 335 M", 335_000_000, 24, 1024),
    Transformer("1.3 B", 1_300_000_000, 24, 2048),
    Transformer("7 B", 6_700_000_000, 32, 4096),
    Transformer("70 B", 69_000_000_000, 80, 8192),
)
FLEETS = (
    (1, "trn1.32xlarge"),
    (16, "trn1.32xlarge"),
    (16, "trn2.48xlarge"),
    (1, "p4d.24xlarge"),
    (16, "p4d.24xlarge"),
    (16, "p5.48xlarge"),
    (128, "p5.48xlarge"),
)
TABLE_MFU = 0.4


def decision_table() -> Iterator[str]:
    """Markdown: the best plan for each model and fleet, from sizes alone."""
    yield f"| nodes | {' | '.join(model.name for model in MODELS)} |"
    yield "|---" * (1 + len(MODELS)) + "|"
    for nodes, name in FLEETS:
        fabric = FABRICS[name]
        best = [candidates(model.work(fabric, TABLE_MFU), model.beside_bytes(), fabric, nodes)[0] for model in MODELS]
        yield f"| {nodes} x {name} | {' | '.join(_plan_text(one) for one in best)} |"
