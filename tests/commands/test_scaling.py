"""`trnpipe scaling`: what it says, where it is from, and what it refuses."""

import json
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands.scaling import decision_table
from tests.docs.markdown import ROOT

CONFIG_CODE = 78


def scaling(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["scaling", f"--workspace={folder}", *words])
    return code, "".join(capsys.readouterr())


def test_a_machine_of_the_flat_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = scaling(tmp_path, capsys, "--model.preset=base", "--nodes=16", "--cycle=none")
    assert code == 0
    assert "(from sizes, as trnpipe doctor)" in text and "(fits)" in text
    assert "jitter 0.0% (not measured: cycle none has no run" in text
    assert "modelled, an upper bound; not measured:" in text
    nodes = [line.split()[0] for line in text.split("nodes  ")[1].splitlines()[1:9]]
    assert nodes == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert "best on 16 x trn1.32xlarge: shard_degree 1" in text


def test_a_machine_of_modules_tracks_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("--train.parallel.shard-degree=8", "--train.parallel.tensor-degree=2", "--train.parallel.recompute=units")
    code, text = scaling(tmp_path, capsys, "--fabric=p4d.24xlarge", "--model.num-layers=2", *plan, "--json")
    assert code == 0, text
    found = json.loads(text)
    assert found["plan"]["shard_degree"] == 8 and found["plan"]["recompute"] == "units"
    assert found["memory_source"] == "tracked on the modules"
    assert found["memory"]["moments"] == 2 * found["memory"]["parameters"]
    assert [row["nodes"] for row in found["rows"]] == [2, 4, 8, 16, 32, 64, 128]  # 16 ranks are two nodes
    assert found["rows"][0]["weak_efficiency"] == 1.0
    assert found["choice"].startswith("shard_degree 1 ")


@pytest.mark.thorough
def test_states_in_slices_are_of_the_flat_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--fabric=p4d.24xlarge", "--train.parallel.shard=state", "--train.parallel.shard-degree=8", "--json")
    code, text = scaling(tmp_path, capsys, "--model.num-layers=2", *words)
    assert code == 0, text
    found = json.loads(text)["memory"]
    whole = found["moments"]  # 8 P / 8, and whole copies with slices of the masters
    assert found["parameters"] == pytest.approx(4 * whole + whole / 2, rel=1e-5)
    assert found["peak"] > found["parameters"] + found["moments"] + found["activations"]


def test_jitter_is_that_of_the_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"event": "train_started", "world_size": 4}]
    events += [{"event": "train_steps", "tokens_per_s": rate} for rate in (1.0, 100.0, 100.0, 100.0, 100 / 1.4)]
    log = tmp_path / "cycles" / "c" / "events.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    code, text = scaling(tmp_path, capsys, "--cycle=c")
    assert code == 0 and "jitter 10% (measured: 4 intervals of cycle c on 4 ranks)" in text


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--fabric=abacus"], "fabric 'abacus'"),
        (["--train.parallel.shard-degree=0"], "shard all and tensor_degree 1 on trn1.32xlarge"),
        (["--fabric=p4d.24xlarge", "--train.parallel.shard-degree=3"], "degrees that divide"),
        (["--nodes=none"], "a number above 0"),
        (["--fixed-s=soon"], "expected: seconds"),
        (["--fixed-s=inf"], "expected: seconds"),
        (["--fixed-s=-1"], "expected: seconds"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], match: str
) -> None:
    code, text = scaling(tmp_path, capsys, *words)
    assert (code, match in text, "Traceback" in text) == (CONFIG_CODE, True, False), text


def test_the_decision_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = scaling(tmp_path, capsys, "--decisions")
    assert code == 0 and text.splitlines() == list(decision_table())
    assert text in (ROOT / "docs" / "parallel.md").read_text(), "put the output of trnpipe scaling --decisions there"
