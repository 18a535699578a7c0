"""What two runs must share to share their graphs, from the settings alone."""

import pytest

from pipeline.commands.doctor import estimates
from pipeline.compile.manifest import Plan, graph_key
from pipeline.core.batch_order import RankSlice
from pipeline.core.footprint import EncoderSizes, Estimate
from pipeline.model.factory import FactoryEncoder
from pipeline.parallel.world import World
from pipeline.settings import resolve
from pipeline.stages.inputs import expected_shapes


def plan(*flags: tuple[str, str]) -> Plan:
    settings = resolve((), {}, flags).settings
    return expected_shapes(settings).plan(settings, World(), "xla:CPU")


@pytest.mark.parametrize(
    "flag", [("--train.optimizer.weight-decay", "0.3"), ("--compile.flags.optlevel", "2")], ids=lambda flag: flag[0]
)
def test_the_key_of_one_program_changes_with_what_the_compiler_is_told(flag: tuple[str, str]) -> None:
    before, after = plan(), plan(flag)
    assert before != after
    assert graph_key("the same operations", before) == graph_key("the same operations", plan())
    assert graph_key("the same operations", before) != graph_key("the same operations", after)


@pytest.mark.parametrize(
    "flag",
    [
        ("--train.optimizer.learning-rate", "0.1"),
        ("--train.seed", "5"),
        ("--train.epochs", "9"),
        ("--train.deadline", "2026-11-20T06:00:00Z"),
    ],
    ids=lambda flag: flag[0],
)
def test_what_travels_with_the_batches_or_stays_on_the_host_changes_no_graph(flag: tuple[str, str]) -> None:

    assert plan() == plan(flag)


OWN = (("--model.factory", "examples.own_encoder:build"), ("--model.hidden-size", "32"), ("--data.buckets", "16x32"))


def of_own(*flags: tuple[str, str]) -> Estimate:
    settings = resolve((), {}, (*OWN, ("--train.loss.contrastive-weight", "0"), *flags)).settings
    found = estimates(settings, expected_shapes(settings), RankSlice(0, 1, 1))
    return max(found.items())[1]


def test_a_module_of_ones_own_is_measured_one_text_a_row_and_not_counted_as_packed_rows_of_a_bert() -> None:
    flags = [
        ("--train.global-batch-size", "64"),
        ("--train.micro-batch-size", "64"),
        ("--train.candidates-per-query", "4"),
    ]
    one = of_own(*flags)
    texts, tokens, width = 64 // 4 * 5, 32, 32  # each query and its four products, as long as the longest
    wider = of_own(*flags, ("--data.buckets", "16x64"))  # forward and backward of its one matrix
    assert wider.flops - one.flops == 3 * 2 * texts * (64 - tokens) * 3 * width * width
    shallow, deep = (of_own(*flags, ("--model.num-layers", layers)) for layers in ("1", "12"))
    assert shallow == deep == one
    # Kept in fp32 of [texts, tokens, width]: what goes into the norm, three into the matrix, and what tanh returned.
    state = 4 * texts * tokens * width
    assert 5 * state < one.footprint.activation_bytes < 6 * state
    twice = of_own(*flags, ("--train.global-batch-size", "128"), ("--train.micro-batch-size", "128"))
    assert twice.footprint.activation_bytes == 2 * one.footprint.activation_bytes
    assert (
        of_own(*flags, ("--train.precision", "bf16")).footprint.activation_bytes == one.footprint.activation_bytes // 2
    )


def test_a_module_of_transformers_costs_the_products_of_its_sizes() -> None:
    pytest.importorskip("transformers")
    options = '{"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}'
    place = (("--model.factory", "examples.own_encoder:transformers_model"), ("--model.factory-options", options))
    settings = resolve((), {}, (*place, ("--model.hidden-size", "32"))).settings
    encoder = FactoryEncoder(settings.model, 100, 0, 0)
    kept, widest, flops = encoder.cost_of_text(24)
    sizes = EncoderSizes(100, 512, 2, 32, 2, 64)
    assert flops == 24 * (2 * sizes.matrix_parameters + 4 * 2 * 32 * 24)
    assert 0 < widest < kept
