"""XLA:CPU: the device loader of torch_xla, and the same training as on the eager CPU. Run by test_xla.py."""

import os
import threading
from collections.abc import Iterator
from itertools import count, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends import Backend, Batch, RankGroup, is_lazy_host, lazy_device_name, open_backend
from pipeline.backends.cpu import CpuBackend
from pipeline.compile.manifest import Recorder
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import ConfigError
from pipeline.data.loader import training_batches
from pipeline.data.shards import TokenRows
from pipeline.model.config import LossConfig, ModelConfig
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import build_model
from pipeline.parallel.strategies.flat import FlatStrategy
from pipeline.parallel.strategies.zero1 import Zero1Strategy
from pipeline.train.config import TrainConfig
from pipeline.train.step import TrainProgram, prepare_model
from pipeline.train.stream import BatchStream
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_program, make_rows, plan_of

# As few operations as a model can have: compiling them is what takes the time here.
SMALL = MODEL.model_copy(
    update={"hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "cross_layers": 0, "mlp_sizes": (8,)}
)
pytestmark = pytest.mark.stage


@pytest.fixture(scope="module")
def xla() -> Backend:
    return open_backend("xla")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("xla"), [(48, 0)])


def batch(number: int) -> Batch:
    return {"x": torch.tensor([number], dtype=torch.int32), "control": torch.tensor([float(number)])}


def test_what_a_host_that_compiles_says_of_itself(xla: Backend) -> None:
    assert xla.is_lazy and xla.shares_host_memory and is_lazy_host(xla.device_name())
    assert xla.device_name() == lazy_device_name(os.environ)
    assert not (xla.is_neuron or xla.can_compile or xla.reduces_in_graph)
    assert xla.runtime_world_size() == 1 and (xla.memory_bytes() or 0) > 0
    xla.synchronise()
    with pytest.raises(ConfigError, match="autocast is not supported on XLA:CPU"):
        xla.autocast(torch.bfloat16)


@pytest.mark.parametrize("total", [0, 1, 2, 19])
def test_all_batches_in_order_on_the_device(xla: Backend, total: int) -> None:
    with xla.loader(batch(i) for i in range(total)) as ready:
        seen = list(ready)
    assert all(b["x"].device.type == "xla" for b in seen)
    assert [int(b["x"].cpu()) for b in seen] == list(range(total))


@pytest.mark.parametrize("good", [0, 1, 7])
def test_an_error_of_the_source_surfaces(xla: Backend, good: int) -> None:
    def source() -> Iterator[Batch]:
        for number in range(good):
            yield batch(number)
        raise ValueError("bad row")

    seen = []
    with xla.loader(source()) as ready, pytest.raises(ValueError, match="bad row"):
        for item in ready:
            seen.append(int(item["x"].cpu()))
    assert seen == list(range(good))


def test_an_upload_that_fails_surfaces(xla: Backend) -> None:
    def source() -> Iterator[Batch]:
        yield batch(0)
        yield {"x": torch.zeros(2, 2).to_sparse()}  # what the device cannot hold
        yield batch(2)

    with xla.loader(source()) as ready, pytest.raises(Exception, match=r".+"):
        list(ready)


def test_leaving_early_ends_its_threads(xla: Backend) -> None:
    before = threading.active_count()
    with xla.loader(batch(i) for i in count()) as ready:
        next(ready)
    assert threading.active_count() <= before


def trained(backend: Backend, rows: TokenRows, config: TrainConfig, model: ModelConfig = SMALL) -> TrainProgram:
    program = make_program(backend, config, model)
    run(program, rows, config)
    return program


def run(program: TrainProgram, rows: TokenRows, config: TrainConfig) -> None:
    groups = grouped(rows, config)
    stream = BatchStream(groups, plan_of(groups, config), RankSlice(), config, 0, 6)
    with program.backend.loader(stream) as batches:
        for step, item in enumerate(batches):
            stream.received(step)
            program.step([item], seeds=[step] if program.has_dropout else ())


def losses(backend: Backend, rows: TokenRows, config: TrainConfig, model: ModelConfig = SMALL) -> list[float]:
    return [row["loss"] for row in trained(backend, rows, config, model).read_metrics(6)]


def test_training_equals_the_eager_cpu_and_compiles_once(xla: Backend, rows: TokenRows) -> None:
    found = [trained(backend, rows, TRAIN) for backend in (xla, CpuBackend())]
    ours, theirs = ([row["loss"] for row in program.read_metrics(6)] for program in found)
    assert ours == pytest.approx(theirs, rel=1e-4)
    served, expected = (program.snapshot()[0] for program in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(served[name], tensor, rtol=1e-3, atol=1e-5)
    compiled = xla.compile_count()
    losses(xla, rows, TRAIN)
    assert xla.compile_count() == compiled  # another run of the same shapes


def test_recomputed_layers_have_the_gradient_and_the_dropout_of_kept_ones(xla: Backend) -> None:
    item = {name: torch.ones(2, 5, dtype=torch.int32) for name in ("query", "product")}
    item |= {"categorical": item["query"][:, :1], "numeric": torch.ones(2, 1)}
    found = []
    for recompute in (False, True):
        model = build_model(SMALL.model_copy(update={"num_layers": 2, "dropout": 0.3}), SPEC, 1)
        choose_forms(model, traced=True, sums_by_matmul=xla.sums_by_matmul)
        strategy = FlatStrategy(
            model, xla, precision="fp32", chunk_mib=64, recompute=recompute, host_mean=lambda tensors: tensors
        )
        strategy.model.train()
        xla.seed(3)
        outputs = strategy.forward({name: tensor.to(xla.device) for name, tensor in item.items()})
        loss = outputs.logits.square().sum() + outputs.query.sum(0).square().sum()
        gradient = strategy.gradient(loss, is_last=True)
        after = torch.rand(1, device=xla.device)
        found.append([torch.cat([x.reshape(-1) for x in xla.to_host([loss, *gradient])]), xla.to_host([after])[0]])
    (expected, after), (ours, same) = found
    assert torch.equal(after, same)
    assert float((ours - expected).norm()) < 1e-6 * float(expected.norm())


@pytest.mark.parametrize("accumulation", [4, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 8))])
def test_a_batch_however_cut_has_the_gradient_of_the_eager_cpu(
    xla: Backend, rows: TokenRows, accumulation: int
) -> None:
    config = TRAIN.model_copy(
        update={
            "global_batch_size": 32,
            "micro_batch_size": 32,
            "candidates_per_query": 1,
            "loss": LossConfig(matryoshka_sizes=(4,)),
        }
    )
    groups = grouped(rows, config)

    def reduced(backend: Backend, parts: int) -> Tensor:
        """The gradient of the batch and behind it its loss, which a second step gives without a new graph."""
        program = make_program(backend, config, SMALL, parts)
        share = RankSlice(accumulation=parts)
        micros = [one.tensors for one in training_batches(groups, plan_of(groups, config), share, 0, 1)]
        for _ in range(2):
            compiled = backend.compile_count()
            program.accumulate([{name: x.to(backend.device) for name, x in one.items()} for one in micros])
            found = [tensor.reshape(-1) for tensor in backend.to_host(program.reduce())]
        assert backend.compile_count() == compiled, "a second step compiles nothing"
        return torch.cat(found)

    expected, ours = reduced(CpuBackend(), 1), reduced(xla, accumulation)
    assert float(expected.norm()) > 1.0
    # Prefixes of 4 numbers make it steep: beside the gradient in fp64, fp32 is 3e-7 off on an eager CPU with AVX-512,
    # 4e-6 on one without vector instructions and 9e-7 on XLA:CPU (Xeon with AMX).
    assert float((ours - expected).norm()) < 1e-5 * float(expected.norm())
    assert float(ours[-1]) == pytest.approx(float(expected[-1]), rel=1e-6)


@pytest.mark.parametrize("boundary", ["fused", pytest.param("split", marks=pytest.mark.thorough)])
def test_chunks_change_no_bit(xla: Backend, rows: TokenRows, boundary: str) -> None:
    whole = TRAIN.model_copy(update={"step_boundary": boundary})
    found = [make_program(xla, whole, SMALL, chunk_mib=mib) for mib in (32.0, 0.001)]
    for program in found:
        run(program, rows, whole)
    assert [len(program.strategy.masters) for program in found] == [2, 7]
    assert found[0].read_metrics(6) == found[1].read_metrics(6)
    (weights, optimizer), (same, again) = (program.snapshot() for program in found)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert all(torch.equal(optimizer[name], again[name]) for name in optimizer)


def test_fused_steps_with_dropout_are_reproducible_without_new_graphs(xla: Backend, rows: TokenRows) -> None:
    graded = TRAIN.model_copy(update={"loss": LossConfig(contrastive_weight=0.0)})
    model, config = SMALL.model_copy(update={"dropout": 0.3}), graded.model_copy(update={"step_boundary": "fused"})
    first = losses(xla, rows, config, model)
    compiled = xla.compile_count()
    assert losses(xla, rows, config, model) == first  # with a seed for each step
    assert xla.compile_count() == compiled  # the seed is data, not part of a graph
    plain = losses(CpuBackend(), rows, graded)
    assert first != plain and first == pytest.approx(plain, rel=0.5)
    assert all(a != b for a, b in pairwise(first))


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_state_in_slices_goes_through_the_host(xla: Backend, rows: TokenRows) -> None:
    """One slice, so that one process is enough: what is exchanged, and where graphs end, is as with several."""
    config = TRAIN.model_copy(update={"loss": LossConfig(contrastive_weight=0.0)})
    expected = trained(CpuBackend(), rows, config)
    everybody = RankGroup(0, ((0,),))

    def in_slices() -> tuple[TrainProgram, list[str]]:
        model = build_model(SMALL, SPEC, config.seed)
        prepare_model(model, xla, config)
        strategy = Zero1Strategy(
            model,
            xla,
            precision=config.precision,
            shards=everybody,
            replicas=everybody,
            largest_bytes=1000,
        )
        recorder = Recorder(xla, {})
        # Two ranks, since one alone has no reason to end a graph before it reduces.
        share = RankSlice(0, 2, 1)
        program = TrainProgram(strategy, xla, config, share, metric_rows=8, buckets=BUCKETS, watch=recorder)
        run(program, rows, config)
        assert not [place for place in recorder.extra_compiles if not place.startswith("start")]  # what came before it
        return program, [graph.phase for graph in recorder.graphs.values()]

    program, phases = in_slices()
    assert sorted(phases) == ["first_micro_step", "publish", "start", "update"]
    ours, theirs = (one.read_metrics(6) for one in (program, expected))
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    (weights, state), (same, again) = program.snapshot(), expected.snapshot()
    for found, wanted in ((weights, same), (state, again)):
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    compiled = xla.compile_count()
    program, _ = in_slices()
    program.restore(weights, state)
    run(program, rows, config)
    assert xla.compile_count() == compiled


def test_a_poisoned_step_changes_nothing(xla: Backend, rows: TokenRows) -> None:
    program = make_program(xla, model=SMALL)
    xla.synchronise()
    groups = grouped(rows)
    item = next(iter(BatchStream(groups, plan_of(groups), RankSlice(), TRAIN, 0, 1)))
    on_device = {name: tensor.to(xla.device) for name, tensor in item.items()}
    on_device["numeric"] = (item["numeric"] * float("nan")).to(xla.device)
    before = {name: tensor.clone() for name, tensor in program.snapshot()[0].items()}
    program.step([on_device])
    after, state = program.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert state["guard"].tolist() == [0, 0, 0, 1, 1]


def test_a_snapshot_from_xla_continues_on_the_cpu(xla: Backend, rows: TokenRows) -> None:
    program = make_program(xla, model=SMALL)
    other = make_program(CpuBackend(), TRAIN.model_copy(update={"seed": 5}), SMALL)
    weights, optimizer = program.snapshot()
    assert all(tensor.device.type == "cpu" for tensor in (*weights.values(), *optimizer.values()))
    other.restore(weights, optimizer)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in other.snapshot()[0].items())


def test_reduction_goes_through_the_host(xla: Backend) -> None:
    tensor = torch.ones(3, device=xla.device)
    xla.reduce([tensor], lambda tensors: [t * 5 for t in tensors])
    assert tensor.cpu().tolist() == [5, 5, 5]
