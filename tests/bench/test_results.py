"""The result files and the table made from them."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.__main__ import BENCHES
from bench.claims import METHODS, Claim
from bench.machine import cpu_model, os_name, this_machine
from bench.results import RESULTS, ROOT, Figure, Result, Target, figure, load_results
from bench.table import (
    END,
    START,
    documents,
    page_of,
    readme_table,
    replace_table,
    script_of,
    spread_text,
    summary_page,
    value_text,
)

pytestmark = pytest.mark.unit


def result(
    name: str = "speed", *, value: float = 1.5, target: float | None = 1.3, changes: dict[str, object] | None = None
) -> Result:
    """A result with one figure in samples/s."""
    judged = None if target is None else Target(figure="rate", comparison=">=", value=target)
    fields: dict[str, object] = {
        "bench": name,
        "title": f"title of {name}",
        "method": "stop-watch",
        "quick": False,
        "date": "2026-01-02T03:04:05+00:00",
        "figures": (figure("rate", [value, value - 0.2, value + 0.4], "samples/s", "how fast"),),
        "target": judged,
        "passed": None if judged is None else judged.holds(value),
        "settings": {"steps": 3},
        "versions": {"trnpipe": "0.1.0+2.9.1", "torch": "2.9.1"},
        "machine": this_machine(),
    }
    return Result.model_validate(fields | (changes or {}))


def test_a_figure_is_the_median_with_its_extremes() -> None:
    measured = figure("wait", [3.0, 1.0, 2.0004999], "s", "waiting")
    assert (measured.value, measured.low, measured.high, measured.repeats) == (2.0, 1.0, 3.0, 3)
    assert figure("once", 7, "graphs", "compiled").repeats == 1


@pytest.mark.parametrize(
    "changes", [{"passed": False}, {"passed": None}, {"surprise": 1}, {"figures": ()}], ids=lambda c: str(next(iter(c)))
)
def test_a_result_that_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises((ValidationError, ValueError)):
        result(changes=changes)


def test_the_readme_has_its_claims_and_below_them_every_miss() -> None:
    results = [result("fast"), result("met"), result("slow", value=1.0), result("free", target=None)]
    row = f"| {results[0].hardware} | 2.9.1 |"
    claims = [Claim("how fast", "fast", "rate", "speed"), Claim("how free", "free", "rate", "speed")]
    assert readme_table(results, claims).splitlines()[2:] == [
        f"| [how fast](docs/results.md#speed) | at least 1.3 samples/s | 1.5 samples/s, met {row}",
        f"| [how free](docs/results.md#speed) |  | 1.5 samples/s {row}",
        "",
        "2 of 3 targets are met. Missed: [slow](bench/results/README.md#slow): how fast (1 samples/s, target at"
        " least 1.3 samples/s). [All results](docs/results.md).",
    ]
    with pytest.raises(ValueError, match="has no figure 'speed'"):
        readme_table(results, [Claim("how fast", "fast", "speed", "speed")])


def test_the_summary_has_a_row_per_claim_and_a_paragraph_per_method() -> None:
    claims = [Claim("how slow", "slow", "rate", "speed"), Claim("how fast", "fast", "rate", "gate")]
    page = summary_page([result("fast"), result("slow", value=1.0)], claims)
    assert "| [how slow](#speed) | at least 1.3 samples/s | 1 samples/s, **missed** |" in page
    assert f"## speed\n\n{METHODS['speed']}\n\n## gate\n\n{METHODS['gate']}\n" in page
    assert "(../bench/results/README.md#slow)" in page


def test_hardware_and_revision_of_a_result() -> None:
    made = result(changes={"versions": {"trnpipe": "0.1.0+abc-dirty"}, "settings": {}})
    assert (made.hardware, made.revision) == (f"{made.machine.cores}-core {made.machine.cpu}", "abc")
    made = result(changes={"settings": {"gpu": "a GPU", "run_with": "0.1.0+first, 0.1.0+second"}})
    assert (made.hardware, made.revision) == ("a GPU", "second")


def test_the_page_has_every_figure_with_how_and_where_it_was_measured() -> None:
    figures = (figure("rate", [1.5, 1.3], "samples/s", "how fast"), figure("wait", 20000, "s", "how slow"))
    page = page_of([result(changes={"figures": figures, "passed": True}), result("free", target=None)])
    assert "| [title of speed](#speed) | 1.4 samples/s | at least 1.3 samples/s | pass |" in page
    assert "Measured without a target: [title of free](#free).\n" in page
    section = page.split("## speed\n")[1].split("## free")[0]
    assert "Target: at least 1.3 samples/s. Measured: 1.4 samples/s, pass." in section
    assert "| how fast | 1.4 samples/s | 1.3 to 1.5 | 2 |\n| how slow | 20,000 s |  | 1 |\n" in section
    assert "Method: stop-watch\n\nSettings: steps 3.\n\n" in section
    assert f"Measured on {this_machine().text}; trnpipe 0.1.0+2.9.1, torch 2.9.1; 2026-01-02. Again: " in section


def test_the_page_has_every_target_and_the_readme_names_those_that_are_missed() -> None:
    figures = (figure("rate", 1.5, "samples/s", "how fast"), figure("left", 0.0, "", "what is left"))
    further = (Target(figure="left", comparison=">", value=0.0), Target(figure="left", comparison="<", value=1.0))
    made = result(changes={"figures": figures, "further": further, "passed": False})
    below = readme_table([made], [Claim("how fast", "speed", "rate", "speed")]).splitlines()[-1]
    assert below.startswith(
        "2 of 3 targets are met. Missed: [speed](bench/results/README.md#speed): what is left (0, target above 0)."
    )
    assert page_of([made]).count("(#speed) |") == 3


def test_shares_are_percent() -> None:
    share = Figure(name="s", value=0.0712, unit="share", low=0.06, high=0.08, repeats=5, text="host")
    assert (value_text(share), spread_text(share)) == ("7.12%", "6.00% to 8.00%")


def test_the_documents_are_what_the_results_make() -> None:
    for path, text in documents(load_results()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m bench.table --write"


def test_the_page_names_scripts_that_exist() -> None:
    for loaded in load_results():
        name = script_of(loaded.bench).removeprefix("python -m bench").split()
        script = ROOT / "bench" / name[0].removeprefix(".")
        assert name[:1] == ["--only"] or script.with_suffix(".py").is_file() or (script / "__main__.py").is_file()


def test_only_the_text_between_the_marks_is_replaced() -> None:
    text = f"# top\n{START}\nold\n{END}\nbottom\n"
    once = replace_table(text, "| new |")
    assert once == f"# top\n{START}\n| new |\n{END}\nbottom\n"
    assert replace_table(once, "| new |") == once


@pytest.mark.parametrize("text", ["", START, END, f"{END}{START}", f"{START}{END}{START}{END}"])
def test_missing_or_repeated_marks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one"):
        replace_table(text, "table")


def test_machine_is_described_without_its_name() -> None:
    assert cpu_model("model name\t: Fast CPU\nflags\t: fpu avx2 avx512f\nmodel name\t: Other\n") == "Fast CPU (AVX-512)"
    assert os_name('NAME="X"\nPRETTY_NAME="X Linux 1"\n') == "X Linux 1"
    assert set(this_machine().model_dump()) == {"cpu", "cores", "memory_gib", "os"}


def test_committed_results_are_whole() -> None:
    for loaded in load_results():
        text = (RESULTS / f"{loaded.bench}.json").read_text(encoding="utf-8")
        assert not loaded.quick, f"{loaded.bench} is a --quick run"
        assert str(ROOT) not in text
        assert json.loads(text)["machine"].keys() == this_machine().model_dump().keys()


def test_every_bench_is_a_script() -> None:
    for bench in BENCHES.values():
        names = (f"{bench.module}.py", f"{bench.module}/__main__.py")
        assert any((Path(ROOT) / "bench" / name).is_file() for name in names)
