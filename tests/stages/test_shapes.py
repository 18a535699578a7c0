"""What two runs must share to share their graphs, from the settings alone."""

import json
from pathlib import Path

import pytest

from pipeline.commands.doctor import estimates
from pipeline.compile.manifest import Plan, graph_key
from pipeline.context import open_context
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import CheckpointError
from pipeline.core.footprint import EncoderSizes, Estimate
from pipeline.core.stop import StopSignal
from pipeline.model.config import NUMBER_BINS
from pipeline.model.factory import FactoryEncoder
from pipeline.parallel.world import World
from pipeline.settings import resolve
from pipeline.stages.inputs import expected_shapes, shapes_of
from tests.embed.checkpoints import make_checkpoint


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


def test_numbers_that_may_be_missing_are_in_the_plan_and_lexical_features_are_not() -> None:
    assert "data.missing" not in plan()
    assert plan(("--data.numeric", "price"))["data.missing"] == 1
    attributes = [{"name": "code", "product": ""}, {"name": "cost", "kind": "number"}]
    assert plan(("--data.attributes", json.dumps(attributes)))["data.missing"] == 2


@pytest.mark.parametrize("missing", [(), ("price",)])
def test_a_parent_determines_the_form_of_missing_numbers(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """Also in graphs that are compiled before the data is prepared."""
    flags = [("--workspace", str(tmp_path / "workspace")), ("--data.numeric", "price"), ("--model-name", "sample")]
    settings = resolve((), {}, flags).settings
    with open_context(settings, StopSignal(), {}) as ctx:
        first = shapes_of(settings, ctx, print).spec
        assert (first.missing, first.bins) == (("price",), NUMBER_BINS)
        prefix = make_checkpoint(ctx.workspace, tmp_path, promoted=False)
        state = json.loads(ctx.workspace.read_bytes(f"{prefix}/state.json"))
        state["inputs"] |= {"numeric": ["price"], "missing": missing}
        ctx.workspace.write_bytes(f"{prefix}/state.json", json.dumps(state).encode())
        started = settings.model_copy(update={"train": settings.train.model_copy(update={"start": prefix})})
        with open_context(started, StopSignal(), {}) as again:
            spec = shapes_of(started, again, print).spec
            assert (spec.missing, spec.bins) == (missing, 0), "of a parent from before there were bins"
            ctx.workspace.write_bytes(f"{prefix}/state.json", b"{}")
            with pytest.raises(CheckpointError, match=r"the state\.json of the parent"):
                shapes_of(started, again, print)


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
