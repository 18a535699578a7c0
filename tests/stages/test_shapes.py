"""What two runs must share to share their graphs, from the settings alone."""

import pytest

from pipeline.compile.manifest import Plan, graph_key
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
