"""The training program on CPU: gradients, guard, figures, state."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.backends.cpu import CpuBackend
from pipeline.commands.doctor import contrastive_batch
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import CheckpointError, DataError
from pipeline.core.footprint import EncoderSizes, Workload, step_flops
from pipeline.data.loader import to_tensors, training_batches
from pipeline.data.shards import TokenRows
from pipeline.model.config import LossConfig
from pipeline.model.relevance import build_model
from pipeline.train.config import OptimizerConfig, TrainConfig
from pipeline.train.optimizer import control_values
from pipeline.train.step import METRICS, TrainProgram, flat_strategy
from tests.train.rows import (
    BUCKETS,
    MODEL,
    SPEC,
    TRAIN,
    grouped,
    make_program,
    make_rows,
    mined_from,
    plan_of,
    taught_at_random,
)

Batches = list[dict[str, Tensor]]
BARE = OptimizerConfig(beta1=0.0, max_grad_norm=1e9)
"""After a step the first moments are the gradient itself."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("program"), [(80, 80)])


def batches_of(rows: TokenRows, steps: int, accumulation: int = 1, rank: int = 0, world_size: int = 1) -> list[Batches]:
    groups = grouped(rows)
    stream = training_batches(groups, plan_of(groups), RankSlice(rank, world_size, accumulation), 0, steps)
    micro = [batch.tensors for batch in stream]
    return [micro[step * accumulation : (step + 1) * accumulation] for step in range(steps)]


def control(step: int, rate: float = 0.01, config: TrainConfig = TRAIN) -> Tensor:
    return control_values(step, rate, config.optimizer)


def step(program: TrainProgram, micros: Batches, control: Tensor) -> None:
    program.step([{**batch, "control": control} for batch in micros])


def train(program: TrainProgram, steps: list[Batches], rate: float = 0.01) -> list[dict[str, float]]:
    for number, micros in enumerate(steps, start=1):
        step(program, micros, control(number, rate))
    return program.read_metrics(len(steps))


def state_of(program: TrainProgram) -> dict[str, Tensor]:
    weights, optimizer = program.snapshot()
    return {**weights, **optimizer}


class Ranks:
    """The other ranks of a world in threads of this process, which meet for every exchange."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._slots: list[list[Tensor]] = [[] for _ in range(world_size)]

    def meet(self, rank: int, tensors: list[Tensor]) -> list[list[Tensor]]:
        self._slots[rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait(120)
        everybody = [list(slot) for slot in self._slots]
        self._barrier.wait(120)
        return everybody

    def mean(self, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        for tensor, *parts in zip(tensors, *self.meet(rank, tensors), strict=True):
            tensor.copy_(sum(parts) / self.world_size)
        return tensors

    def gather(self, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*self.meet(rank, tensors), strict=True)]


def gradients(
    rows: TokenRows, config: TrainConfig, world_size: int, accumulation: int, two_passes: bool, *, taught: bool = False
) -> Tensor:
    """(losses, then the first moments after the last step with beta1 0: the gradient itself) of every rank, [R, ...].

    One step at rate 0.
    """
    mined = mined_from(rows, config.mined_per_query) if config.mined_per_query else None
    groups = grouped(rows, config, mined, taught_at_random(rows) if taught else None)
    ranks, found = Ranks(world_size), {}

    class Backend(CpuBackend):
        gathers_in_graph = not two_passes

    def run(rank: int) -> None:
        model = build_model(MODEL, SPEC, config.seed)
        if taught:
            model.add_projection(5, config.seed)
        strategy = flat_strategy(
            model,
            Backend(),
            config,
            world_size=world_size,
            host_mean=lambda tensors: ranks.mean(rank, tensors),
            host_gather=lambda tensors: ranks.gather(rank, tensors),
        )
        share = RankSlice(rank, world_size, accumulation)
        program = TrainProgram(strategy, strategy.backend, config, share, metric_rows=1, buckets=rows.buckets)
        micros = [batch.tensors for batch in training_batches(groups, plan_of(groups, config), share, 0, 1)]
        step(program, micros, control_values(1, 0.0, config.optimizer))
        (figures,) = program.read_metrics(1)
        moments = [moment.reshape(-1) for moment in program.optimizer.exp_avg]
        found[rank] = torch.cat([torch.tensor([figures["loss"]]), *moments])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return torch.stack([found[rank] for rank in range(world_size)])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("two_passes", "mined", "teacher"),
    [
        (False, 0, False),
        (False, 3, False),
        (True, 0, False),
        (True, 3, False),
        (False, 3, True),
        (True, 3, True),
        (True, 0, True),
    ],
)
def test_loss_and_gradient_of_a_global_batch_do_not_depend_on_how_it_is_cut(
    rows: TokenRows, world_size: int, accumulation: int, two_passes: bool, mined: int, teacher: bool
) -> None:
    config = TRAIN.model_copy(
        update={
            "mined_per_query": mined,
            "global_batch_size": 64,
            "micro_batch_size": 64,
            "loss": LossConfig(matryoshka_sizes=(4, 8) if mined else (), teacher_weight=0.5),
            "optimizer": BARE,
        }
    )
    whole = gradients(rows, config, 1, 1, two_passes=False, taught=teacher)[0]
    cut = gradients(rows, config, world_size, accumulation, two_passes, taught=teacher)
    assert float(whole[1:].abs().max()) > 1e-2
    if teacher:
        assert float(whole[0]) > float(gradients(rows, config, 1, 1, two_passes=False)[0, 0]), "its terms are added"
    for rank in cut:
        torch.testing.assert_close(rank, whole, rtol=1e-5, atol=1e-6)


def test_both_passes_draw_the_same_dropout(rows: TokenRows) -> None:
    """The gradient by finite differences: the loss of the figures is that of the masks the gradient was made with."""
    dropped = MODEL.model_copy(update={"dropout": 0.5})
    config = TRAIN.model_copy(update={"optimizer": BARE})
    (micros,) = batches_of(rows, 1, accumulation=2)

    def loss_and_gradient(shift: float) -> tuple[float, Tensor]:
        program = make_program(CpuBackend(), config, dropped, accumulation=2)
        with torch.no_grad():
            program.strategy.masters[0] += shift * direction if shift else 0.0
        program.step([{**batch, "control": control_values(1, 0.0, config.optimizer)} for batch in micros], seeds=[3, 4])
        return program.read_metrics(1)[0]["loss"], program.optimizer.exp_avg[0].clone()

    direction = torch.zeros(1)
    _, gradient = loss_and_gradient(0.0)
    direction = gradient / gradient.norm()
    slope = (loss_and_gradient(1e-3)[0] - loss_and_gradient(-1e-3)[0]) / 2e-3
    assert slope == pytest.approx(float(gradient.norm()), rel=0.02)


def test_the_gradient_is_clipped_to_the_norm(rows: TokenRows) -> None:
    """With Adam's moments at zero and beta1 = 0, the first moment is the clipped gradient itself."""
    tight = OptimizerConfig(max_grad_norm=1e-3, beta1=0.0)
    program = make_program(CpuBackend(), TRAIN.model_copy(update={"optimizer": tight}))
    ((batch,),) = batches_of(rows, 1)
    step(program, [batch], control_values(1, 0.0, tight))
    (figures,) = program.read_metrics(1)
    norm = sum(float(moment.square().sum()) for moment in program.optimizer.exp_avg) ** 0.5
    assert figures["grad_norm"] > 1e-2
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_a_nan_step_changes_nothing_but_the_counters(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    steps = batches_of(rows, 3)
    train(program, steps[:2])
    before = state_of(program)
    poisoned = {**steps[2][0], "numeric": torch.full_like(steps[2][0]["numeric"], float("nan"))}
    step(program, [poisoned], control(3))
    after = state_of(program)
    assert before["guard"].tolist() != after["guard"].tolist()
    assert torch.equal(before.pop("guard")[:3], after["guard"][:3])
    assert all(torch.equal(before[name], after[name]) for name in before)
    (figures,) = program.read_metrics(1)
    assert figures["skipped"] == figures["skipped_in_a_row"] == 1
    step(program, steps[2], control(4))
    assert program.read_metrics(1)[0]["skipped_in_a_row"] == 0
    assert not torch.equal(before["head.weight"], state_of(program)["head.weight"])


def test_figures_are_the_last_steps_oldest_first(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    figures = train(program, batches_of(rows, 3))
    assert [row["step"] for row in figures] == [1.0, 2.0, 3.0]
    assert all(set(row) == set(METRICS) for row in figures)
    assert program.read_metrics(0) == []
    assert [row["step"] for row in program.read_metrics(2)] == [2.0, 3.0]


def test_restored_state_continues_bit_by_bit(rows: TokenRows) -> None:
    steps = batches_of(rows, 4)
    program = make_program(CpuBackend())
    train(program, steps[:2])
    weights, optimizer = ({name: tensor.clone() for name, tensor in part.items()} for part in program.snapshot())
    other = make_program(CpuBackend(), TRAIN.model_copy(update={"seed": 99}))
    other.restore(weights, optimizer)
    for number, (batch,) in enumerate(steps[2:], start=3):
        for one in (program, other):
            step(one, [batch], control(number))
    left, right = state_of(program), state_of(other)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_chunks_change_no_bit_also_not_of_a_run_that_is_continued_with_others(rows: TokenRows) -> None:
    """Clipping, too: the norm is that of all gradients. `middle` starts whole and goes on in chunks."""
    steps = batches_of(rows, 4, accumulation=2)
    whole, chunked, middle, other = (
        make_program(CpuBackend(), accumulation=2, chunk_mib=mib) for mib in (32.0, 0.002, 32.0, 0.002)
    )
    assert len(whole.strategy.masters) == 2 and len(chunked.strategy.masters) > 8
    assert train(whole, steps) == train(chunked, steps)
    train(middle, steps[:2])
    other.restore(*middle.snapshot())
    for number, micros in enumerate(steps[2:], start=3):
        step(other, micros, control(number))
    expected = state_of(whole)
    for program in (chunked, other):
        found = state_of(program)
        assert found.keys() == expected.keys(), "a checkpoint does not show the chunks"
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_state_of_another_shape_is_refused_by_name(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    weights, optimizer = program.snapshot()
    with pytest.raises(CheckpointError, match="the optimizer state has tensors"):
        program.restore(weights, {"guard": optimizer["guard"]})
    with pytest.raises(CheckpointError, match=r"exp_avg.plain has shape \[3\]"):
        program.restore(weights, {**optimizer, "exp_avg.plain": torch.zeros(3)})


def test_a_batch_outside_the_buckets_is_a_data_error(rows: TokenRows) -> None:
    ((batch,),) = batches_of(rows, 1)
    wide = {**batch, "tokens": torch.zeros(4, 7, dtype=torch.int32)}
    with pytest.raises(DataError, match=r"a batch has shape 7\s+expected: one of 16, 22, 4x6, 6x8"):
        step(make_program(CpuBackend()), [wide], control(1))


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_low_precision_trains_close_to_fp32(rows: TokenRows, precision: str) -> None:
    config = TRAIN.model_copy(update={"precision": precision})
    program = make_program(CpuBackend(), config)
    steps = batches_of(rows, 4)
    low, full = train(program, steps, 0.001), train(make_program(CpuBackend()), steps, 0.001)
    assert [row["loss"] for row in low] == pytest.approx([row["loss"] for row in full], rel=0.02)
    assert low != full
    assert all(master.dtype == torch.float32 for master in program.strategy.masters)
    assert low[-1]["skipped"] == 0
    assert program.outputs(steps[0][0]).logits.dtype == torch.float32


def test_scores_are_without_gradient_and_dropout(rows: TokenRows) -> None:
    program = make_program(CpuBackend(), model=MODEL.model_copy(update={"dropout": 0.5}))
    ((batch,),) = batches_of(rows, 1)
    step(program, [batch], control(1))
    pairs = to_tensors(rows.read(np.zeros(4, dtype=np.int64), np.arange(4), 1))
    first, second = program.outputs(pairs).logits, program.outputs(pairs).logits
    assert torch.equal(first, second) and not first.requires_grad
    assert program.has_dropout and not make_program(CpuBackend()).has_dropout


@pytest.mark.parametrize("accumulation", [1, 2])
def test_flops_of_a_step_are_those_that_torch_counts(rows: TokenRows, accumulation: int) -> None:
    """What `trnpipe doctor` takes a step to be, within 3 %.

    The estimate has no heads in the first pass; a traced device leaves them out, this one does not.
    """
    config = TRAIN.model_copy(update={"global_batch_size": 32, "micro_batch_size": 32})
    larger = MODEL.model_copy(update={"hidden_size": 128, "num_layers": 3, "intermediate_size": 512})
    share = RankSlice(0, 1, accumulation)
    model = build_model(larger, SPEC, 1)
    heads = sum(
        layer.weight.numel()
        for part in (model.interactions, model.head)
        for layer in part.modules()
        if isinstance(layer, nn.Linear)
    )
    size = larger.encoder
    encoder = EncoderSizes(
        SPEC.vocab_size, 16, size.num_layers, size.hidden_size, size.num_heads, size.intermediate_size
    )
    program = TrainProgram(
        flat_strategy(model, CpuBackend(), config), CpuBackend(), config, share, metric_rows=1, buckets=BUCKETS
    )
    groups = grouped(rows, config)
    micros = [batch.tensors for batch in training_batches(groups, plan_of(groups, config), share, 0, 1)]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        program.accumulate(micros)
    samples = config.global_batch_size // accumulation
    contrastive = contrastive_batch(config, share)
    assert contrastive is not None and contrastive.two_passes == (accumulation > 1)
    work = Workload.for_groups(
        samples,
        micros[0]["tokens"].shape[1],
        slots=config.candidates_per_query,
        accumulation=accumulation,
        contrastive=contrastive,
    )
    assert counter.get_total_flops() == pytest.approx(step_flops(encoder, work, heads), rel=0.03)
