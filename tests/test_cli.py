"""The command line: commands, exit codes, messages, events of a stage, and what may be imported when."""

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

import pipeline
from jobs.cli import COMMANDS as JOBS_COMMANDS
from jobs.cli import USAGE as JOBS_USAGE
from jobs.cli import main as jobs_main
from jobs.settings import CycleSettings
from pipeline import cli, commands
from pipeline.command_line import Usage
from pipeline.commands import COMMANDS, USAGE
from pipeline.context import StageContext, StageResult
from pipeline.core import errors
from pipeline.core.errors import ConfigError
from pipeline.parallel.launch import MAX_RESTARTS
from pipeline.settings import Settings, leaves
from pipeline.telemetry.events import EventName

Run = Callable[[Settings, StageContext], StageResult]
HEAVY = {"torch", "torch_xla", "boto3", "botocore", "pyarrow", "tokenizers", "rich"}


def result_of(ctx: StageContext, status: str = "done") -> StageResult:
    now = datetime.now(UTC)
    fields = {"stage": "fake", "cycle": ctx.cycle, "status": status, "inputs": {}, "figures": {"rows": 3}}
    versions = {"settings_hash": ctx.settings_hash, "code_version": ctx.code_version}
    return StageResult.model_validate({**fields, **versions, "started": now, "finished": now})


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Adds a stage named `fake` to the table."""

    def add(run: Run) -> None:
        module = types.ModuleType("pipeline.stages.fake")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pipeline.stages.fake", module)
        monkeypatch.setitem(commands.COMMANDS, "fake", "a stage of the tests")
        monkeypatch.setitem(commands.USAGE, "fake", Usage())

    return add


def raising(error: BaseException) -> Run:
    def run(settings: Settings, ctx: StageContext) -> StageResult:
        raise error

    return run


def events_of(workspace: Path, cycle: str = "c1") -> list[dict[str, object]]:
    return [json.loads(line) for line in (workspace / "cycles" / cycle / "events.jsonl").read_text().splitlines()]


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_version_and_help_of_both_commands() -> None:
    assert python("-m", "pipeline", "--version").stdout.startswith(f"trnpipe {pipeline.__version__}")
    assert python("-m", "jobs", "--version").stdout.startswith(f"trnjobs {pipeline.__version__}")
    assert "usage: trnjobs" in python("-m", "jobs", "--help").stdout


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_overview_lists_all_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2:3].isalpha()]
    assert {*listed} >= COMMANDS.keys() and listed[0] == "init", "what is seldom needed comes last"
    assert listed.index("search") < listed.index("train") < listed.index("doctor")


def help_of(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize(
    ("main", "program", "command"),
    [(cli.main, "trnpipe", one) for one in COMMANDS if one != "completion"]
    + [(jobs_main, "trnjobs", one) for one in JOBS_COMMANDS if one != "completion"],
)
def test_help_has_examples_and_a_dozen_settings(
    main: Callable[[list[str]], int], program: str, command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(main, capsys, command, "--train.seed", "3", word)
    assert f"usage: {program} {command}" in text and f"\n  {program} {command}" in text
    assert len([line for line in text.splitlines() if line.startswith("  --") and "." in line.split()[0]]) <= 12
    lines, examples = text.splitlines(), (f"  {program} ", f"    {program} ")
    assert len(lines) < 66 and all(len(line) <= 80 or line.startswith(examples) for line in lines)
    places = (USAGE if program == "trnpipe" else JOBS_USAGE)[command].scope.split()
    assert {f"--{name}" for name in places} == {"--workspace", "--cycle"} & {
        line.split()[0] for line in lines if line[:4] == "  --"
    }


def test_help_of_a_section_and_of_all_that_a_command_reads(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(cli.main, capsys, "train", "--help", "train.optimizer")
    flags = {line.split()[0] for line in text.splitlines() if line.startswith("  --") and "." in line.split()[0]}
    assert flags == {leaf.flag for name, leaf in leaves(Settings).items() if name.startswith("train.optimizer.")}
    text = help_of(cli.main, capsys, "prepare", "--help-all")
    assert "--data.columns.query" in text and "--workspace" in text and "--embed.precision" not in text
    assert "--model.mlp-sizes int,..." in help_of(cli.main, capsys, "train", "--help", "model")
    assert "--train.start str" in text and "[incumbent]" in text
    assert "--train.loss.temperature" in help_of(cli.main, capsys, "--help", "train.loss")
    assert "usage: trnpipe search" in help_of(cli.main, capsys, "help", "search")
    assert cli.main(["train", "--help", "train.lozz"]) == ConfigError.exit_code
    assert "did you mean train.loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("usage", "commands", "model"), [(USAGE, COMMANDS, Settings), (JOBS_USAGE, JOBS_COMMANDS, CycleSettings)]
)
def test_help_names_settings_that_exist(
    usage: Mapping[str, Usage], commands: Mapping[str, str], model: type[Settings]
) -> None:
    known = leaves(model)
    assert usage.keys() == commands.keys() - {"completion"}
    for one in usage.values():
        assert one.examples and set(one.common.split()) <= known.keys()
        assert all(any(f"{name}.".startswith(f"{read}.") for name in known) for read in one.reads.split())


@pytest.mark.parametrize("program", ["trnpipe", "trnjobs"])
def test_bash_completes_commands_and_flags(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = cli.main if program == "trnpipe" else jobs_main
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    own = (
        [
            (["search", "--be"], "--beside"),
            (["registry", "rollback", "--re"], "--reason"),
            (["registry", "ro"], "rollback"),
        ]
        if program == "trnpipe"
        else [(["submit", "--fr"], "--fresh"), (["submit", "--target", ""], "sagemaker"), (["logs", "--ta"], "--tail")]
    )
    known = [(["co"], "config"), (["config", "--train.max-s"], "--train.max-steps"), (["completion", "z"], "zsh")]
    for typed, expected in (*known, (["config", "--model.preset", "t"], "tiny"), *own):
        words = shlex.join([program, *typed])
        ask = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _{program}; echo ${{COMPREPLY[@]}}"
        assert (
            expected in subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()
        )
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0  # typed into fish 3.6 once; CI has none
    commands, flags = capsys.readouterr().out.split("\n", 1)
    assert main(["completion", "--help"]) == 0
    assert f"{program} completion bash" in capsys.readouterr().out
    assert commands.startswith(f"complete -c {program} ") and " config " in commands and " --train.max-steps " in flags
    assert main(["completion", "tcsh"]) == ConfigError.exit_code


def test_config_shows_the_resolved_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[train]\nseed = 4\nmax_steps = 1")
    monkeypatch.setenv("TRNPIPE_DATA__PATH", "s3://b/in")
    assert cli.main(["config", "--json", f"--config={file}", "--train.max-steps=5", "--log.tensorboard"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["settings"]["train"]["max_steps"] == 5
    assert record["sources"] == {
        "train.seed": str(file),
        "data.path": "env TRNPIPE_DATA__PATH",
        "train.max_steps": "flag --train.max-steps",
        "log.tensorboard": "flag --log.tensorboard",
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trian"], "did you mean train?"),
        (["--train.seed", "3"], "unknown command '--train.seed'"),
        (["config", "what"], "unrecognized arguments: what"),
        (["cache"], "expected: one of status, repair, sync, before the flags"),
        (["cache", "--workspace", "w", "status"], "the action is missing"),
        (["cache", "stauts"], "trnpipe cache has no action 'stauts' (did you mean status?)"),
        (["cache", "sink", "--help"], "one of status, repair, sync"),
        (["cache", "status", "repair"], "unrecognized arguments: repair"),
        (["cache", "status", "--json"], "unknown setting json"),
        (["config", "--config"], "argument --config: expected one argument"),
        (["config", "--config", "no-such.toml"], "no-such.toml"),
        (["config", "--train.max-step", "3"], "such as --train.max-steps, --"),
        (["export", "--formt", "x"], "such as --format, --"),
        (["config", "--zzzzqqq", "3"], "next: trnpipe config, which lists all settings"),
        (["train", "--json"], "unknown setting json"),
        (["config", "--train.seed", "--train.epochs", "1"], "--train.seed has no value"),
    ],
)
def test_a_bad_command_line_exits_78_with_a_message(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == errors.ConfigError.exit_code == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
    assert "ConfigError" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("error", errors.TrnpipeError.__subclasses__(), ids=lambda error: error.__name__)
def test_each_error_has_its_exit_code_and_no_traceback(
    error: type[errors.TrnpipeError], install: Callable[[Run], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raising(error("seen this", expected="that", next_command="do it")))
    assert cli.main(["fake", "--workspace", str(tmp_path), "--cycle", "c1"]) == error.exit_code
    text = capsys.readouterr().err
    assert text == f"trnpipe fake: {error.__name__}: seen this\n  expected: that\n  next: do it\n"
    last = events_of(tmp_path)[-1]
    stopped = error is errors.Preempted
    assert last["event"] == (EventName.STAGE_STOPPED if stopped else EventName.STAGE_FAILED)
    assert last["error"] == error.__name__


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (KeyboardInterrupt(), 143, False),
        (ValueError("broken"), 1, True),
        (OSError(errno.EISDIR, "a folder"), 1, True),
        (OSError(errno.ENOSPC, "no space", "/scratch/tokens"), errors.TransientError.exit_code, False),
    ],
)
def test_only_a_bug_shows_a_traceback(
    error: BaseException,
    code: int,
    traceback: bool,
    install: Callable[[Run], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(raising(error))
    assert cli.main(["fake", "--workspace", str(tmp_path)]) == code
    assert ("Traceback" in capsys.readouterr().err) is traceback


def test_a_log_that_cannot_be_written_does_not_hide_the_error(
    install: Callable[[Run], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(settings: Settings, ctx: StageContext) -> StageResult:
        def full(*_: object, **__: object) -> None:
            raise errors.TransientError("no space left")

        monkeypatch.setattr(ctx.events, "emit", full)
        raise errors.NumericError("NaN")

    install(run)
    assert cli.main(["fake", "--workspace", str(tmp_path)]) == errors.NumericError.exit_code


@pytest.mark.parametrize(
    ("status", "event"), [("done", EventName.STAGE_FINISHED), ("already_done", EventName.STAGE_SKIPPED)]
)
def test_a_stage_leaves_its_start_and_outcome(
    status: str, event: EventName, install: Callable[[Run], None], tmp_path: Path
) -> None:
    install(lambda settings, ctx: result_of(ctx, status))
    assert cli.main(["fake", "--workspace", f"file://{tmp_path}", "--cycle", "c1"]) == 0
    first, last = events_of(tmp_path)
    assert (first["event"], last["event"]) == (EventName.STAGE_STARTED, event)
    assert first["settings_hash"]
    assert first["code_version"]
    assert last["figures"] == {"rows": 3}


@pytest.mark.parametrize(
    ("words", "env", "launched"),
    [
        (["train", "--launch.processes", "2", "--cycle", "c9"], {}, True),
        (["train"], {}, False),
        (["train", "--launch.processes", "2"], {"WORLD_SIZE": "2", "RANK": "1"}, False),
        (["prepare", "--launch.processes", "2"], {}, False),
    ],
)
def test_only_training_is_launched_in_ranks_and_only_once(
    words: list[str], env: dict[str, str], launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []

    def fake_launch(given: list[str], processes: int, stop: object, *, restarts: int) -> int:
        called.extend([given, processes, restarts])
        return 75

    monkeypatch.setattr(cli, "launch", fake_launch)
    monkeypatch.setattr(cli, "run_stage", lambda *_: 0)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(words) == (75 if launched else 0)
    assert called == ([[*words, "--cycle", "c9"], 2, MAX_RESTARTS] if launched else [])


def imported_by(*words: str) -> set[str]:
    """Top-level packages that a command imports, from -X importtime."""
    done = python("-X", "importtime", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    "words", [["train", "--help"], ["config"], ["cache", "status", "--workspace", "none"]], ids=" ".join
)
def test_what_only_looks_imports_nothing_heavy(words: list[str]) -> None:
    packages = imported_by("-m", "pipeline", *words)
    assert "pydantic" in packages
    assert not packages & HEAVY


def test_prepare_does_not_import_torch() -> None:
    packages = imported_by("-c", "import pipeline.stages.prepare")
    assert "pyarrow" in packages
    assert not packages & {"torch", "torch_xla", "transformers"}


def test_a_closed_pipe_is_no_failure() -> None:
    line = f"{sys.executable} -m pipeline train --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 4096), [(4096, 4096)]),
        ((1024, resource.RLIM_INFINITY), [(65_536, resource.RLIM_INFINITY)]),
        ((1_048_576, 1_048_576), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_as_many_files_may_be_open_as_the_machine_allows(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: asked.append(wanted))
    cli.allow_open_files()
    assert asked == expected
