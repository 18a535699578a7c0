"""The context: cycle, scratch, ranks, and the event log."""

import json
import subprocess
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest

import pipeline
from pipeline.compile.manifest import GraphManifest, store_manifest
from pipeline.context import (
    open_context,
    scratch_folder,
    store_result,
    with_backend,
)
from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import open_storage
from pipeline.model.config import ModelConfig
from pipeline.settings import Settings, resolve, settings_hash
from pipeline.telemetry import console
from pipeline.telemetry.events import EventName, code_version
from tests.backends.xla_process import needs_xla


class Elsewhere:
    """Stands for a storage without local paths."""

    root = "s3://bucket/prefix"

    def local_path(self, key: str) -> None:
        return None


def test_long_work_inside_is_shown_by_the_first_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    settings = Settings(workspace=str(tmp_path / "w"), cycle="c1")
    for rank in ("0", "1"):
        env = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        with open_context(settings, StopSignal(), env), progress(f"work of rank {rank}", 4, "rows") as advance:
            advance(3)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("work of rank 0: 3/4 rows | ") and " rows/s | eta " in first
    assert last.startswith("work of rank 0: 3 rows in ")
    with progress("nobody looks", 1, "rows") as advance:
        advance(1)
    assert not capsys.readouterr().out


def test_context_of_a_local_workspace(tmp_path: Path) -> None:
    settings = Settings(workspace=str(tmp_path / "w"), cycle="c1")
    with open_context(settings, StopSignal(), {}) as ctx:
        ctx.events.emit(EventName.STAGE_STARTED, stage="x")
    assert ctx.cycle == "c1"
    assert ctx.settings_hash == settings_hash(settings)
    assert ctx.scratch.is_relative_to(tmp_path / "w")
    line = json.loads((tmp_path / "w/cycles/c1/events.jsonl").read_text())
    assert (line["event"], line["stage"]) == ("stage_started", "x")


SMALL = {"preset": "small"}


@needs_xla
@pytest.mark.parametrize(
    ("model", "began", "stage", "expected"),
    [
        ({"preset": "tiny"}, "", "train", "xla"),
        (SMALL, "", "train", "cpu"),
        (SMALL, "", "compile", "cpu"),
        ({"preset": "tiny", "num_layers": 6}, "", "train", "cpu"),
        (SMALL | {"factory": "a.b:c", "hidden_size": 768}, "", "train", "xla"),
        (SMALL, "compiled for xla:CPU", "embed", "xla"),
        (SMALL, "compiled for xla:NEURON", "embed", "cpu"),
        (SMALL, "compiled for a cache that is gone", "embed", "cpu"),
        (SMALL, "trained on xla", "train", "xla"),
        (SMALL, "trained on cpu", "train", "cpu"),
        (SMALL, "trained on xla", "embed", "cpu"),
    ],
)
def test_auto_on_a_host_alone_goes_by_the_model_and_by_how_the_cycle_began(
    model: dict[str, object],
    began: str,
    stage: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    settings = Settings(workspace=str(tmp_path / "w"), cycle="c1", model=ModelConfig.model_validate(model))
    with open_context(settings, StopSignal(), {}) as ctx:
        what, _, device = began.rpartition(" ")
        if what.startswith("compiled for"):
            manifest = GraphManifest(plan={"device": device}, graphs=())
            if device != "gone":
                store_manifest(ctx.workspace, manifest)
            outputs = {"manifest": manifest.key}
            now = datetime.now(UTC)
            store_result(ctx.workspace, ctx.finish("compile", now, inputs={}, outputs=outputs, figures={"graphs": 16}))
        elif what:
            ctx.events.emit(EventName.TRAIN_STARTED, backend=device)
            ctx.events.flush(durable=True)
        found = with_backend(settings, ctx, stage)
        named = settings.model_copy(update={"backend": "xla"})
        assert with_backend(named, ctx, stage) is named
    assert found == settings.model_copy(update={"backend": expected})
    said = capsys.readouterr().out.splitlines()
    is_tiny = expected == "xla" and not began
    assert len(said) == (0 if is_tiny else 1) and all(f"backend {expected}" in line for line in said)


def test_after_the_stop_signal_one_storage_gives_up_and_one_still_commits(tmp_path: Path) -> None:
    stop = StopSignal()
    with open_context(Settings(workspace=str(tmp_path / "w"), cycle="c1"), stop, {}) as ctx:
        stop.set("SIGTERM")
        for storage, prefix in ((ctx.workspace, "a"), (ctx.workspace_after_stop, "b")):
            (tmp_path / prefix).mkdir()
            (tmp_path / prefix / "file").write_bytes(b"x")
            with pytest.raises(Preempted) if storage is ctx.workspace else nullcontext():
                commit_dir(storage, tmp_path / prefix, prefix, kind="test", fields={})
        assert read_manifest(ctx.workspace_after_stop, "a") is None
        assert read_manifest(ctx.workspace_after_stop, "b") is not None


def test_other_ranks_write_no_events_and_no_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    with open_context(Settings(workspace=str(tmp_path), cycle="c1"), StopSignal(), env) as ctx:
        ctx.events.emit(EventName.STAGE_STARTED, stage="x")
        ctx.events.flush(durable=True)
        ctx.console.info("hello")
    assert not list(tmp_path.rglob("*.jsonl"))
    assert capsys.readouterr().out == ""


def test_scratch_of_a_remote_workspace_is_found_again(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = scratch_folder(Settings(), Elsewhere(), env)  # type: ignore[arg-type]
    assert first.is_dir()
    assert first.is_relative_to(tmp_path / "cache" / "trnpipe")
    assert scratch_folder(Settings(), Elsewhere(), env) == first  # type: ignore[arg-type]
    named = scratch_folder(Settings(scratch=str(tmp_path / "mine")), Elsewhere(), env)  # type: ignore[arg-type]
    assert named == tmp_path / "mine"


def test_an_empty_scratch_is_none(tmp_path: Path) -> None:
    """An environment variable that is set to nothing; the folder one stands in is no scratch folder."""
    settings = resolve([], {"TRNPIPE_SCRATCH": ""}, [("--workspace", str(tmp_path / "w"))]).settings
    found = scratch_folder(settings, open_storage(settings.workspace), {})
    assert found.is_relative_to(tmp_path / "w")


def test_scratch_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(workspace=str(tmp_path / "w"), scratch=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="scratch folder"):
        scratch_folder(settings, open_storage(settings.workspace), {})


def test_code_version_of_a_checkout_and_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "pipeline" / "__init__.py"
    fake.parent.mkdir()
    fake.write_text("")
    monkeypatch.setattr(pipeline, "__file__", str(fake))
    plain = pipeline.__version__
    assert code_version.__wrapped__() == plain
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert code_version.__wrapped__() == plain, "no commit yet"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "-c", "commit.gpgsign=false", "commit", "-q", "--no-verify", "-m", "x"], check=True)
    clean = code_version.__wrapped__()
    fake.write_text("# edited")
    assert clean.startswith(f"{plain}+")
    assert code_version.__wrapped__() == f"{clean}-dirty"
