"""`trnpipe doctor`: the estimate, and the lint of our own graphs in every preset, without a step being run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from tests.backends.xla_process import needs_xla
from tests.fault.harness import ENV
from tests.kit.peak import measured, peak_mib

CONFIG_CODE = 78


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", measured(["doctor", f"--workspace={folder}", *words])]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENV}, check=False)


def test_a_workspace_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    assert cli.main(["doctor", f"--workspace={tmp_path}/typo"]) == 0
    assert cli.main(["export", f"--workspace={tmp_path}/typo", f"--out={tmp_path}/out"]) == CONFIG_CODE
    assert cli.main(["embed", "verify", f"--workspace={tmp_path}/typo"]) == CONFIG_CODE
    assert not [*tmp_path.iterdir()]


def test_the_estimate_names_what_fits_and_what_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def estimate(*words: str) -> tuple[int, str]:
        code = cli.main(["doctor", f"--workspace={tmp_path}", *words])
        return code, "".join(capsys.readouterr())

    code, fits = estimate("--model.preset=base", "--train.precision=bf16")
    assert code == 0, fits
    assert "assuming a vocabulary of 8,192 tokens, 4 labels, and texts of up to 128 tokens" in fits
    assert fits.count("fits)") == 2  # lengths of rows
    code, large = estimate("--model.preset=large", "--train.global-batch-size=512", "--train.micro-batch-size=512")
    assert (code, "DOES NOT FIT" in large) == (CONFIG_CODE, True)
    code, unknown = estimate("--estimate.instance=p4d.24xlarge")
    assert code == CONFIG_CODE
    assert "instance type p4d.24xlarge" in unknown and "trn1.32xlarge" in unknown


@needs_xla
@pytest.mark.stage
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("tiny", marks=pytest.mark.thorough),
        pytest.param("small", marks=pytest.mark.thorough),
        pytest.param("base", marks=pytest.mark.thorough),
        pytest.param("large", marks=pytest.mark.thorough),
    ],
)
def test_the_lint_is_silent_on_every_preset(tmp_path: Path, preset: str) -> None:
    batch = ("--train.global-batch-size=32", "--train.micro-batch-size=32", "--data.buckets=16x16,16x32,64x64")
    done = doctor(tmp_path, "--hlo", f"--model.preset={preset}", *batch)
    assert done.returncode == 0, done.stdout + done.stderr
    # The start; a step for each of four lengths of rows, an evaluation for each of three buckets; rows to embed of two
    # lengths.
    assert "traced 10 graphs" in done.stdout
    assert "lint: 0 errors, 0 warnings" in done.stdout
    # In proportion to the layers. With views of the weights replayed for every view it was 5,001, 14,209, 35,698.
    (largest,) = re.findall(r"\(([\d,]+) operations", done.stdout)
    assert int(largest.replace(",", "")) < {"tiny": 3_700, "small": 6_900, "base": 12_200, "large": 23_200}[preset]
    assert peak_mib(done.stdout) < 10 * 1024


@needs_xla
@pytest.mark.stage
@pytest.mark.thorough
def test_accumulation_and_dropout_are_traced_as_they_will_run(tmp_path: Path) -> None:
    small = ("--model.num-layers=1", "--data.buckets=8x16", "--model.max-positions=16")
    done = doctor(
        *(tmp_path, "--hlo", *small, "--model.dropout=0.1", "--train.micro-batch-size=16"),
        *("--train.step-boundary=split", "--launch.processes=2", "--train.parallel.shard=state"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The start, the contrastive loss over all, the update, the evaluation; of rows of two lengths the embeddings of a
    # micro-batch, first and further micro-steps; rows of texts to embed of two lengths.
    assert "traced 12 graphs" in done.stdout
    assert "`trnpipe compile` lints the graphs of 2 ranks, including their collectives" in done.stdout
    assert "lint: 0 errors, 0 warnings" in done.stdout
