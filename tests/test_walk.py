"""A stranger's walk with README alone: own data, a wrong column, a refused model, old beside new, back again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError, GateRefused

BIN = Path(sys.executable).parent
KINDS = ("phone", "laptop", "camera", "drill", "kettle", "shoe", "monitor", "vacuum", "charger", "wallet")
SMALL = "--train.max-steps 80 --embed.output.rows-per-part 1000 --backend cpu"
LOOSE = "--gate.drops ndcg@10=0.9,macro_f1=0.9,retrieval_ndcg@10=0.9 --gate.first-baselines warn"


class Shell:
    """Types commands in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME")
        self.env = {name: os.environ[name] for name in names if name in os.environ}
        self.env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{folder}/cache"}

    def type(self, line: str, code: int = 0) -> str:
        """Return what a command printed, on a pipe; asserts its exit code."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        told = done.stdout + done.stderr
        assert done.returncode == code, f"{line}\nexit {done.returncode}, expected {code}\n{told[-4000:]}"
        assert "\x1b" not in told and "Traceback" not in told
        return told


def judgements(queries: range) -> str:
    """Rows of a product of the same kind and number, of the same kind, and of another one, for each query."""
    random, rows = np.random.default_rng(len(queries)), list[str]()
    for query in queries:
        kind, other = KINDS[query % 10], KINDS[(query + 3) % 10]
        for grade, title in (
            (2, f"{kind} model {query} black"),
            (1, f"{kind} case"),
            (0, f"{other} model {query + 7}"),
        ):
            brand = f"brand{query % 4}"
            rows.append(f"{kind} {query},{brand} {title},{grade},{random.uniform(5, 90):.2f},{brand}")
    return "\n".join(rows) + "\n"


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_strangers_walk(tmp_path: Path) -> None:
    shell, table = Shell(tmp_path), tmp_path / "judgements.csv"
    table.write_text("search_term,item_name,grade,price,brand\n" + judgements(range(700)) + ",no query,1,2,brand1\n")

    told = shell.type("trnpipe prepare --data.path judgements.csv", DataError.exit_code)
    assert "--data.columns.query search_term --data.columns.title item_name --data.columns.label grade" in told

    told = shell.type("trnpipe init judgements.csv")
    assert "700 queries" in told.replace("701", "700") and "wrote trnpipe.toml" in told
    assert 'numeric = ["price"]' in (tmp_path / "trnpipe.toml").read_text()

    told = shell.type(f"trnjobs submit --cycle first {SMALL} {LOOSE}")
    assert "cycle first: promoted" in told

    told = shell.type(
        f"trnjobs submit --cycle second --train.start scratch {SMALL} --train.max-steps 2", GateRefused.exit_code
    )
    assert re.search(r"cycle second: refused", told)
    assert re.search(r"refused: \S.* \d\.\d+, production \d\.\d+, -\d\.\d+", told)

    table.write_text(table.read_text() + judgements(range(700, 900)))
    told = shell.type(f"trnjobs submit --cycle third {SMALL} {LOOSE}")
    assert "cycle third: promoted" in told
    assert "rows" in shell.type("trnjobs diff first third")

    told = shell.type('trnpipe search "kettle 14" --beside previous')
    assert told.splitlines()[1].split() == [f"third/step-{_step(told)}", "first/step-80"]
    assert "kettle" in told
    assert "charger" in shell.type('trnpipe search "charger 8" --by words')

    told = shell.type('trnpipe registry rollback --reason "third finds less"')
    assert "checkpoints/first/step-80" in told
    assert shell.type('trnpipe search "kettle 14"').startswith("kettle 14 | first/step-80")


def _step(told: str) -> str:
    found = re.search(r"third/step-(\d+)", told)
    return found[1] if found else ""
