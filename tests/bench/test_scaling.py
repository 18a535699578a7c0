"""The scaling model against published figures, each named where it stands, and against itself."""

from dataclasses import replace

import pytest

from bench.scaling.__main__ import decision_table, main
from bench.scaling.fabrics import FABRICS, Group, all_reduce_s
from bench.scaling.model import Spread, Work, candidates, scaled, step_time
from pipeline.core.layout import Layout, layout_of
from pipeline.core.machines import MACHINES
from tests.docs.markdown import ROOT

pytestmark = pytest.mark.unit
MIB = 2**20
TRN1, P4D, H100 = (FABRICS[name] for name in ("trn1.32xlarge", "p4d.24xlarge", "h100-infiniband"))
ALONE = replace(P4D, max_tensor=1)
SEVEN_B = 6_700_000_000


@pytest.mark.parametrize(
    ("size_mib", "published_ms"), [(1, 1.328), (16, 2.138), (64, 3.963), (256, 11.954), (1024, 41.806)]
)
def test_all_reduce_of_two_trn1(size_mib: int, published_ms: float) -> None:
    """nccom-test user guide: fp32, 64 ranks on 2 trn1.32xlarge. The runtime uses a flat ring there."""
    modelled = 1e3 * all_reduce_s(TRN1, Group(2, 32), size_mib * MIB, "flat")
    assert modelled == pytest.approx(published_ms, rel=0.10)


def test_the_bus_bandwidth_that_the_machines_name() -> None:
    seconds = all_reduce_s(TRN1, Group(2, 32), 128 * MIB, "flat")
    assert 2 * 63 / 64 / 8 / seconds == pytest.approx(MACHINES["trn1.32xlarge"].bus_gib_s, rel=0.10)


# BERT-large on trn1.32xlarge, Neuron SDK 2.15 performance pages: samples/s on one node with 16,384 a step (AdamW) and
# 65,536 (LAMB), 16 samples a micro-step of a core. Two rows, two unknowns.
_SHORT_S, _LONG_S = 16_384 / 3530, 65_536 / 3733
MICRO_S = (_LONG_S - _SHORT_S) / (128 - 32)
FIXED_S = _SHORT_S - 32 * MICRO_S
BERT_LARGE = Work(336_000_000, 24, MICRO_S, 32, FIXED_S, reduce_bytes=2)
FLAT = Spread(Layout(), overlaps=False)


def bert_large_samples_s(nodes: int, micro_steps: int) -> float:
    work = Work(336_000_000, 24, MICRO_S, micro_steps, FIXED_S, reduce_bytes=2)
    spread = Spread(layout_of(0, nodes * 32, shard_degree=1, tensor_degree=1), overlaps=False)
    one_node = Spread(layout_of(0, 32, shard_degree=1, tensor_degree=1), overlaps=False)
    # the fixed part was measured with the reduction within a node in it
    step_s = step_time(work, spread, TRN1).step_s - step_time(work, one_node, TRN1).exposed_s
    return micro_steps * 16 * 32 * nodes / step_s


@pytest.mark.parametrize(
    ("micro_steps", "published", "tolerance"), [(2, 24_518, 0.10), (2, 26_069, 0.10), (128, 53_069, 0.15)]
)
def test_bert_large_on_16_trn1(micro_steps: int, published: float, tolerance: float) -> None:
    """Strong scaling (SDK 2.14, and the newest old row) and weak scaling (SDK 2.15, LAMB, 1 M a step)."""
    assert (round(FIXED_S, 3), round(MICRO_S, 4)) == (0.337, 0.1345)
    assert bert_large_samples_s(16, micro_steps) == pytest.approx(published, rel=tolerance)


def test_strong_scaling_on_trn1_is_lost_to_the_fixed_part_not_to_the_network() -> None:
    eight = scaled(BERT_LARGE, FLAT, TRN1, shard_degree=1, nodes=(1, 8))[1]
    assert eight.weak_efficiency * 8 == pytest.approx(7.97, rel=0.01)
    assert eight.strong_speedup == pytest.approx(5.2, rel=0.03)
    place = Spread(layout_of(0, 8 * 32, shard_degree=1, tensor_degree=1), overlaps=False)
    quarter = step_time(Work(336_000_000, 24, MICRO_S, 4, FIXED_S / 4, reduce_bytes=2), place, TRN1).step_s
    assert _SHORT_S / quarter == pytest.approx(7.3, rel=0.05)


@pytest.mark.parametrize(("tokens_s", "published"), [(5762, 0.973), (6667, 0.977), (8532, 0.982)])
def test_llama_8b_from_8_to_128_h100(tokens_s: float, published: float) -> None:
    """torchtitan's performance page: FSDP2, 8 to 128 H100, bf16, with torch.compile, and in fp8."""
    work = Work(8_030_000_000, 32, 16_384 / tokens_s, gather_bytes=2)
    modelled = scaled(work, Spread(Layout()), H100, shard_degree=0, nodes=(1, 16))[1].weak_efficiency
    assert modelled == pytest.approx(published, abs=0.03)


def test_the_table_of_the_article_is_one_jitter() -> None:
    """Amazon Search, MLP of seven layers, ml.p3.16xlarge: 99, 55, 27 and 13.5 minutes on 1, 2, 4 and 8 nodes."""
    work = Work(1_000_000, 7, 99 * 60 / 8, 8)
    rows = scaled(work, Spread(Layout()), FABRICS["p3.16xlarge"], shard_degree=1, nodes=(1, 2, 4, 8), jitter=0.097)
    assert [99 / row.strong_speedup for row in rows] == pytest.approx([99, 55, 27, 13.5], rel=0.02)


def test_the_smallest_shard_degree_that_fits_node_sized_first() -> None:
    micro_s = 6 * SEVEN_B * 8192 / (0.5 * 312e12)  # 8,192 tokens at half of the peak
    work = Work(SEVEN_B, 32, micro_s, gather_bytes=2, exchange_bytes=2 * 2048 * 4096)
    beside = {False: 8 * 2**30, True: 2**30}
    first = candidates(work, beside, ALONE, 16)[0]
    assert (first.spread.layout.shard_size, first.spread.recompute, first.fits) == (8, False, True)
    exposed = [
        step_time(
            Work(SEVEN_B, 10_000, 0.0, gather_bytes=2, reduce_bytes=2),
            Spread(layout_of(0, 128, shard_degree=degree, tensor_degree=1)),
            P4D,
        ).step_s
        for degree in (8, 16, 32, 64, 128)
    ]
    assert exposed == sorted(exposed)
    assert exposed == pytest.approx([0.78, 0.95, 1.03, 1.07, 1.10], rel=0.03)
    tight = candidates(work, {False: 20 * 2**30, True: 19 * 2**30}, ALONE, 16)
    assert tight[0].spread.layout.shard_size == 16  # 13.4 GB of states and gradients no longer do
    none = candidates(work, {False: 60 * 2**30, True: 50 * 2**30}, ALONE, 16)
    assert not any(one.fits for one in none)
    assert none[0].memory_bytes == min(one.memory_bytes for one in none)
    shared = candidates(work, {False: 60 * 2**30, True: 50 * 2**30}, P4D, 16)[0]
    assert shared.fits and shared.spread.layout.tensor_size > 1


def test_a_model_that_fits_is_not_sharded_and_the_flat_devices_shard_states() -> None:
    small = Work(110_000_000, 12, 0.1)
    beside = {False: 5 * 2**30, True: 2**30}
    for fabric in (TRN1, P4D):
        first = candidates(small, beside, fabric, 4)[0]
        assert (first.spread.layout.shard_size, first.spread.recompute) == (1, False)
    large = Work(1_000_000_000, 24, 0.1)
    tight = candidates(large, {False: 2**30, True: 2**29}, TRN1, 4)[0]
    assert (tight.spread.shard, tight.spread.layout.shard_size, tight.fits) == ("state", 32, True)


def test_the_decision_table_is_that_of_the_docs() -> None:
    text = "\n".join(decision_table())
    assert text in (ROOT / "docs" / "parallel.md").read_text(), "put the output of python -m bench.scaling there"


def test_the_steps_of_a_model_over_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "7 B", "--fabric", "p4d.24xlarge"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64", "128"]
