"""The example notebook: its cells run from a new workspace, and the outputs that are kept are those of such a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "cycle.ipynb"


def cells() -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in found["cells"] if cell["cell_type"] == "code"]


@pytest.mark.thorough
@pytest.mark.slow
def test_its_cells_run_in_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    code = "\n\n".join("".join(cell["source"]) for cell in cells())
    script = tmp_path / "cells.py"
    script.write_text(code + "\nassert result.outcome == 'succeeded' and len(nearest) == 3\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded | promoted" in done.stdout and (tmp_path / "build/notebook/reports/first.html").is_file()


def test_its_outputs_are_kept_and_none_is_an_error() -> None:
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells()) and len(outputs) >= len(cells())
    assert {output["output_type"] for output in outputs} <= {"execute_result", "stream"}
    shown = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert any("succeeded" in "".join(html) for html in shown) and not any("<script" in "".join(html) for html in shown)
