"""The pages in Chromium, if there is one on the path: nothing asked for, nothing said on the console, nothing too wide.

Every page stands in a frame of its own, so one run of the browser measures them all at every width.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.cycle_page import T0, make_cycle
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord, JobState
from jobs.cycle.page.publish import INDEX_PAGE, report_key, write_page
from jobs.plan.spec import JobPlan
from jobs.settings import JobsConfig
from pipeline.evaluate.report import load_report, store_report
from pipeline.io.storage import Storage, open_storage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.stage, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")]
VERDICTS = {
    "promoted": "promoted",
    "first": "promoted WITHOUT a comparison",
    "refused": "refused",
    "failed": "failed",
    "cancelled": "cancelled",
}
WHOLE = ("first", "promoted", "refused")
"""Pages of cycles in which every stage may leave its section."""
WIDTHS, MAX_HIGH = (360, 1100, 1280), 3500
PAPER, DARK_PAPER = "rgb(255, 255, 255)", "rgb(18, 23, 28)"
MEASURE = """
onload = async () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement, found_one = {
      name: frame.id, width: frame.width, needs: root.scrollWidth, high: root.scrollHeight,
      asked: frame.contentWindow.performance.getEntriesByType("resource").length,
      paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      verdict: page.querySelector("h1 span")?.innerText, reads: page.querySelector("header").innerText,
    };
    if (frame.contentWindow.axe) found_one.axe = (await frame.contentWindow.axe.run()).violations
      .filter(one => ["serious", "critical"].includes(one.impact)).map(one => one.id + " " + one.nodes[0].html);
    found.push(found_one);
  }
  document.body.innerText = "MEASURED" + JSON.stringify(found) + "END";
};
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page for every way to end, and the index."""
    storage = open_storage(str(tmp_path_factory.mktemp("pages")))
    made = {name: make_cycle(storage, name, began=T0 + 1e5 * i, parent="" if name == "first" else "first")
            for i, name in enumerate(["first", *(name for name in VERDICTS if name != "first")])}  # fmt: skip
    _without_comparison(storage, "first")
    _refused(storage, "refused")
    for name, (store, plan, records, closed) in made.items():
        write_page(*_ended(name, store, plan, records, closed))
    return {name: storage.read_bytes(report_key(name)).decode() for name in made} | {
        "index": storage.read_bytes(INDEX_PAGE).decode()
    }


def _without_comparison(storage: Storage, cycle: str) -> None:
    key = f"cycles/{cycle}/evaluate/result.json"
    result = json.loads(storage.read_bytes(key))
    result["figures"]["without_comparison"] = True
    storage.write_bytes(key, json.dumps(result).encode())


def _refused(storage: Storage, cycle: str) -> None:
    report = load_report(storage, cycle)
    assert report is not None
    checks = tuple(one.model_copy(update={"outcome": "fail"}) for one in report.verdict.checks)
    verdict = report.verdict.model_copy(update={"promote": False, "checks": checks})
    store_report(storage, report.model_copy(update={"verdict": verdict}))


def _ended(
    name: str, store: CycleStore, plan: JobPlan, records: tuple[JobRecord, ...], closed: Closed
) -> tuple[CycleStore, JobPlan, tuple[JobRecord, ...], JobsConfig, Closed]:
    """A cycle that ended as it is called: the others have succeeded."""
    if name in ("failed", "cancelled"):
        error = "DataError: s3://bucket/judgements.csv has no column 'query'\n  next: --data.columns.query search_term"
        last = {"exit_code": 65, "error": error if name == "failed" else ""}
        attempts = (records[0].all_attempts()[-1].model_copy(update=last),)
        records = (records[0].model_copy(update={"state": JobState.FAILED, "attempts": attempts}),)
    outcome = name if name in ("refused", "failed", "cancelled") else "succeeded"
    return store, plan, records, JobsConfig(), closed.model_copy(update={"outcome": outcome, "reason": "a reason"})


def browse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=60000"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True)


def measured(
    folder: Path, texts: dict[str, str], *options: str, widths: Sequence[int] = WIDTHS
) -> tuple[list[dict[str, Any]], list[str]]:
    """What the browser says of each page at each width, and the lines of its console."""
    frames = (
        f'<iframe id="{name}" width="{width}" height="800" srcdoc="{html.escape(text)}"></iframe>'
        for name, text in texts.items()
        for width in widths
    )
    (folder / "all.html").write_text(f"<!doctype html><body>{''.join(frames)}<script>{MEASURE}</script>")
    ended = browse(folder, *options, "--dump-dom", (folder / "all.html").as_uri())
    [found] = re.findall("MEASURED(.*)END", html.unescape(ended.stdout))
    return json.loads(found), [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


def test_nothing_is_asked_for_said_or_too_wide_and_the_verdict_can_be_read(
    pages: dict[str, str], tmp_path: Path
) -> None:
    found, console = measured(tmp_path, pages)
    assert console == [] and len(found) == len(WIDTHS) * (len(VERDICTS) + 1)
    for one in found:
        assert one["needs"] <= int(one["width"]), f"{one['name']} is too wide: {one}"
        assert (one["asked"], one["paper"]) == (0, PAPER)
        if one["width"] == "1280" and one["name"] in WHOLE:
            assert one["high"] <= MAX_HIGH, f"{one['name']} is too long: {one['high']} px"
        if one["name"] in VERDICTS:
            assert one["verdict"] == VERDICTS[one["name"]]
    heads = {one["name"]: one["reads"] for one in found}
    assert "nDCG@10" in heads["refused"] and "Production is unchanged." in heads["refused"]
    assert "--data.columns.query search_term" in heads["failed"] and "trnjobs logs prepare" in heads["failed"]
    assert "Cancelled: a reason." in heads["cancelled"]


def test_in_the_dark_it_is_dark(pages: dict[str, str], tmp_path: Path) -> None:
    found, _ = measured(tmp_path, pages, "--blink-settings=preferredColorScheme=0")
    assert {one["paper"] for one in found} == {DARK_PAPER}


@pytest.mark.skipif(find_spec("axe_core_python") is None, reason="axe-core-python is not installed")
@pytest.mark.parametrize("scheme", ["0", "1"])
def test_axe_has_no_serious_finding(pages: dict[str, str], tmp_path: Path, scheme: str) -> None:
    spec = find_spec("axe_core_python")
    assert spec is not None and spec.origin is not None
    axe = (Path(spec.origin).parent / "axe.min.js").read_text()
    opened = {
        name: re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", pages[name])
        .replace("<details>", "<details open>" if name == "promoted" else "<details>")
        .replace("</head>", f"<script>{axe}</script></head>")
        for name in ("promoted", "failed", "index")
    }
    found, _ = measured(tmp_path, opened, f"--blink-settings=preferredColorScheme={scheme}", widths=(1280,))
    assert {one["name"]: one["axe"] for one in found if one["axe"]} == {}
    assert all("axe" in one for one in found)


def test_on_paper_what_is_folded_is_printed(pages: dict[str, str], tmp_path: Path) -> None:
    sizes = {}
    for name, text in (("page", pages["promoted"]), ("folded", pages["promoted"].replace("details::", "none::"))):
        (tmp_path / f"{name}.html").write_text(text)
        pdf = tmp_path / f"{name}.pdf"
        browse(tmp_path, f"--print-to-pdf={pdf}", (tmp_path / f"{name}.html").as_uri())
        sizes[name] = len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))
    assert sizes["page"] > sizes["folded"] + 2


def test_a_page_that_asks_for_something_is_found_out(pages: dict[str, str], tmp_path: Path) -> None:
    """What the first test here would see."""
    bad = pages["promoted"].replace("</body>", '<img src="http://127.0.0.1:9/x.png"><p><nobr>' + "x" * 900)
    found, console = measured(tmp_path, {"promoted": bad})
    assert console and all(one["needs"] > int(one["width"]) for one in found if one["width"] == "360")
