"""What the running text of our documents names (files, commands, settings, variables, exit codes) exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jobs.cli
from jobs.settings import CycleSettings
from pipeline.commands import COMMANDS, STAGES, TOOLS
from pipeline.core.errors import EXIT_TABLE
from pipeline.core.machines import PRICES_USD_PER_HOUR
from pipeline.settings import leaves
from tests.docs.commands import make_targets
from tests.docs.markdown import ROOT, markdown_files, prose

DOCUMENTS = [path for path in markdown_files() if path.name != "CHANGELOG.md"]  # which tells of what is gone
DOCS = ROOT / "docs"
OURS = ("bench", "configs", "docker", "docs", "infra", "jobs", "pipeline", "tests", "trnpipe")
MADE_BY_USERS = {
    "configs/ours.toml",
    "infra/backend.hcl",
    "infra/terraform.tfvars",
    "infra/.terraform.lock.hcl",
    "pipeline/backends/neuron.py",  # the next device
}
"""Files of ours that are not in a fresh checkout."""
SETTINGS = leaves(CycleSettings)
_CODE = re.compile(r"`([^`]+)`")
_FILE = re.compile(r"^[\w./*-]+\.(py|json|jsonl|toml|html|log|done|neff|pb|safetensors|sig|lock|md|tf|sh|parquet)$")
_SETTING = re.compile(
    rf"^\[*({'|'.join(sorted({name.split('.')[0] for name in SETTINGS if '.' in name}))})\.[a-z_.]+\]*$"
)


def codes(path: Path) -> Iterator[tuple[int, str]]:
    """Inline code with its line."""
    for number, line in prose(path):
        for match in _CODE.finditer(line):
            yield number, match[1].strip()


def problem_of(code: str, folder: Path) -> str:
    """What is wrong with a piece of inline code; empty when nothing is, or nobody can tell."""
    words = code.split()
    if re.fullmatch(rf"({'|'.join(OURS)})/[\w./*-]*", code) and code not in MADE_BY_USERS:
        found = any(ROOT.glob(code.rstrip("/"))) or any(folder.glob(code.rstrip("/")))
        return "" if found else "no such file"
    if words[0] == "trnpipe" and len(words) > 1 and words[1].isalpha():
        return _of_trnpipe(words)
    if words[0] == "trnjobs" and len(words) > 1 and words[1].isalpha():
        return "" if words[1] in jobs.cli.COMMANDS else "no such command of trnjobs"
    if words[0] == "make" and len(words) > 1:
        unknown = [word for word in words[1:] if "=" not in word and '"' not in word and word not in make_targets()]
        return f"no target {unknown[0]}" if unknown and '"' not in code else ""
    if words[0].startswith("--") and "." in words[0]:
        return "" if _is_setting(words[0].removeprefix("--").replace("-", "_")) else "no such setting"
    name = code.partition("=")[0].strip()
    if _SETTING.match(name) and not _FILE.match(name):
        return "" if _is_setting(name.strip("[]")) else "no such setting"
    return ""


def _of_trnpipe(words: list[str]) -> str:
    if words[1] not in COMMANDS:
        return "no such command of trnpipe"
    actions = TOOLS[words[1]].actions if words[1] in TOOLS else {}
    action = words[2] if len(words) > 2 and words[2].isalpha() else ""
    return "" if not action or not actions or action in actions or action.isupper() else f"no action {action}"


def _is_setting(name: str) -> bool:
    is_section = any(known.startswith(f"{name}.") for known in SETTINGS)
    return name in SETTINGS or is_section or name.rpartition(".")[0] in SETTINGS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_the_text_names_exists(path: Path) -> None:
    found = {f"{path.name}:{number}: {code}": problem_of(code, path.parent) for number, code in codes(path)}
    assert {place: problem for place, problem in found.items() if problem} == {}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("pipeline/core/shuffles.py", "no such file"),
        ("trnpipe trian", "no such command of trnpipe"),
        ("trnjobs stats", "no such command of trnjobs"),
        ("make deplo", "no target deplo"),
        ("--train.max-step 3", "no such setting"),
        ("[jobs.schedules]", "no such setting"),
        ("train.guard.patience = 3", ""),
        ("--gate.floors ndcg@10=0.8", ""),
        ("docker/*.lock", ""),
    ],
)
def test_a_wrong_name_is_found(code: str, problem: str) -> None:
    assert problem_of(code, ROOT) == problem


def rows(path: Path, heading: str) -> list[list[str]]:
    """Cells of the table rows below a heading, up to the next."""
    text = f"\n{path.read_text(encoding='utf-8')}".split(f"\n{heading}\n")[1]
    lines = re.split(r"\n#+ ", text)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_every_exit_code_has_a_row_with_its_name_and_whether_it_is_retried() -> None:
    table = {row[0]: row for row in rows(DOCS / "runbook.md", "## Exit codes")}
    for rule in EXIT_TABLE:
        _, name, again, advice = table[str(rule.exit_code)]
        assert name.startswith(rule.name)
        assert again.startswith("yes") is rule.retry
        assert advice
    assert {"0", "1", "137", "none"} <= table.keys()


def test_what_a_check_costs_is_its_hours_at_the_list_prices() -> None:
    """Machines of a row: `16 vCPU + 1 trn1.2xlarge`."""
    prices = {**PRICES_USD_PER_HOUR, "vCPU": 0.048}
    table = [row for row in rows(DOCS / "first-run.md", "# First run on AWS") if re.fullmatch(r"[\d.]+", row[-1])]
    assert table
    for _, check, machines, hours, dollars in table:
        priced = [float(number) * prices[kind] for number, kind in re.findall(r"(\d+) (\S+)", machines)]
        assert float(dollars) == pytest.approx(float(hours) * sum(priced), abs=0.005), check


def test_every_variable_of_terraform_is_explained() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "infra").glob("*.tf"))
    variables = set(re.findall(r'^variable "(\w+)"', text, re.M))
    explained = {
        name for row in rows(DOCS / "deploy.md", "## Variables") for name in re.findall(r"`([a-z_]+)`", row[0])
    }
    assert explained == variables - {"emulator"}


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in {*STAGES, *TOOLS, *jobs.cli.COMMANDS} - {"config"}:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), f"README.md does not name {name}"
