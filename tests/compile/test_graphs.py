"""HLO text: its instructions, how two graphs differ, and that the names of graphs are those of every process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.compile.graphs import arrays, describe, difference, op_counts, read_instructions
from tests.backends.xla_process import needs_xla
from tests.compile import traces
from tests.kit import zygote

# As XLA prints it, with what real traces seldom have: comments, quotes, an array over several lines.
LONG = r"""HloModule IrToHlo.12, entry_computation_layout={(f32[], /*index=1*/s64[4,5]{1,0})->(f32[4]{0})}, replica_count=2

%AddComputation.7 (x.8: f32[], y.9: f32[]) -> f32[] {
  %x.8 = f32[] parameter(0)
  %y.9 = f32[] parameter(1)
  ROOT %add.10 = f32[] add(f32[] %x.8, f32[] %y.9)
}

ENTRY %IrToHlo.12 (p0.1: f32[], p1.2: s64[4,5]) -> (f32[4]) {
  %p1.2 = s64[4,5]{1,0} parameter(1), metadata={op_type="xla__device_data" op_name="a}, b" source_file="/x y/z.py" source_line=33}
  %p0.1 = f32[] parameter(0)
  %constant.4 = f32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  })
  %convert.5 = f32[4,5]{1,0:T(8,128)} convert(s64[4,5]{1,0} %p1.2), metadata={op_type="aten__to" op_name="aten__to"}
  %custom-call.6 = (f32[4,5]{1,0}, /*index=1*/u8[<=7]{0}) custom-call(f32[4,5]{1,0} %convert.5, /*index=1*/f32[] %p0.1), custom_call_target="Qr", backend_config="{\"a, b\": (1}"
  %get-tuple-element.7 = f32[4,5]{1,0} get-tuple-element((f32[4,5]{1,0}, u8[<=7]{0}) %custom-call.6), index=0
  %reduce.8 = f32[4]{0} reduce(f32[4,5]{1,0} %get-tuple-element.7, f32[] %p0.1), dimensions={1}, to_apply=%AddComputation.7
  ROOT %tuple.11 = (f32[4]{0}) tuple(f32[4]{0} %reduce.8)
}
"""  # noqa: E501


def test_instructions_are_read() -> None:
    found = {one.name: one for one in read_instructions(LONG)}
    assert list(found)[:3] == ["add.10", "p1.2", "p0.1"] and len(found) == 9, "parameters of the graph alone"
    assert (found["p1.2"].signature, found["p1.2"].source) == ("parameter s64[4,5]", "/x y/z.py:33")
    assert (found["convert.5"].shape, found["convert.5"].first_shape) == ("f32[4,5]", "s64[4,5]")
    assert arrays(found["custom-call.6"].shape) == [("f32", ["4", "5"]), ("u8", ["<=7"])]
    assert found["custom-call.6"].attribute("custom_call_target") == "Qr"
    assert (found["reduce.8"].combiner, found["reduce.8"].attribute("dimensions")) == ("add", "{1}")
    assert sum(op_counts(LONG).values()) == 9 and list(op_counts(LONG)) == sorted(op_counts(LONG))


def test_difference_names_inputs_first() -> None:
    known = {"dot f32[64,256]": 3, "parameter f32[64,2]": 1, "reduce f32[64]": 2, "tanh f32[64]": 1}
    seen = {"dot f32[64,256]": 6, "parameter f32[32,2]": 1, "reduce f32[64]": 1, "tanh f32[64]": 1}
    changes = difference(known, seen)
    assert describe(changes) == "+1 parameter f32[32,2], -1 parameter f32[64,2], +3 dot f32[64,256], -1 reduce f32[64]"
    assert describe(changes, limit=2) == "+1 parameter f32[32,2], -1 parameter f32[64,2] and 2 more"
    assert difference(seen, known) == {op: -change for op, change in changes.items()} and difference(seen, seen) == {}


@pytest.mark.stage
@needs_xla
def test_graphs_have_one_name_in_every_process(tmp_path: Path) -> None:
    """In another process, folder and hash seed; and one for each different graph."""
    env = {**os.environ, "PYTHONPATH": str(zygote.ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "tests.compile.trial_graphs", traces.OWN[0], traces.OWN[-1]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    again = json.loads(done.stdout)
    graphs = {flag: met["graphs"] for flag, met in traces.own().items()}
    assert {flag: met["graphs"] for flag, met in again.items()} == {flag: graphs[flag] for flag in again}
    tiny = graphs[traces.OWN[0]]
    assert len(set(tiny.values())) < len(tiny), "one for each shape"
    for flag, other in graphs.items():
        if flag.startswith("--model.architecture"):
            assert len(other) == len(tiny), "as many graphs as BERT"
            shared = {tiny[key] for key in tiny.keys() & other.keys()}
            assert shared <= {"contrast"}, "the same embeddings are compared"
