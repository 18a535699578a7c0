"""What `trnpipe doctor` takes a step to be is what the training program does."""

import pytest
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.backends.cpu import CpuBackend
from pipeline.commands.doctor import contrastive_batch
from pipeline.core.batch_order import RankShare
from pipeline.core.footprint import EncoderSizes, Workload, step_flops
from pipeline.data.loader import training_batches
from pipeline.data.shards import TokenRows
from pipeline.model.relevance import RelevanceModel, build_model
from pipeline.train.config import TrainConfig
from pipeline.train.step import TrainProgram, flat_strategy
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_rows, plan_of

CONFIG = TRAIN.model_copy(update={"global_batch_size": 32, "micro_batch_size": 32})
LARGER = MODEL.model_copy(update={"hidden_size": 128, "num_layers": 3, "intermediate_size": 512})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("passes"), [(0, 160)])


def program_of(config: TrainConfig, share: RankShare, backend: CpuBackend, model: RelevanceModel) -> TrainProgram:
    strategy = flat_strategy(model, backend, config)
    return TrainProgram(strategy, backend, config, share, figure_rows=1, buckets=BUCKETS)


def micros_of(rows: TokenRows, config: TrainConfig, share: RankShare) -> list[dict[str, Tensor]]:
    groups = grouped(rows, config)
    return [batch.tensors for batch in training_batches(groups, plan_of(groups, config), share, 0, 1)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_flops_of_a_step_are_those_that_torch_counts(rows: TokenRows, accumulation: int) -> None:
    """Within 3 %: the estimate has no heads in the first pass; a traced device leaves them out, this one does not."""
    share = RankShare(0, 1, accumulation)
    model = build_model(LARGER, SPEC, 1)
    heads = sum(
        layer.weight.numel()
        for part in (model.interactions, model.head)
        for layer in part.modules()
        if isinstance(layer, nn.Linear)
    )
    size = LARGER.encoder
    encoder = EncoderSizes(
        SPEC.vocab_size, 16, size.num_layers, size.hidden_size, size.num_heads, size.intermediate_size
    )
    program, micros = program_of(CONFIG, share, CpuBackend(), model), micros_of(rows, CONFIG, share)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        program.accumulate(micros)
    samples = CONFIG.global_batch_size // accumulation
    contrastive = contrastive_batch(CONFIG, share)
    assert contrastive is not None and contrastive.two_passes == (accumulation > 1)
    work = Workload.of_groups(
        samples,
        micros[0]["tokens"].shape[1],
        slots=CONFIG.candidates_per_query,
        accumulation=accumulation,
        contrastive=contrastive,
    )
    assert counter.get_total_flops() == pytest.approx(step_flops(encoder, work, heads), rel=0.03)
