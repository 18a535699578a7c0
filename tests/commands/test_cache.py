"""`trnpipe cache`: status, repair and the exchange between two machines, through the command line."""

import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.compile.cache import EntryState
from pipeline.compile.manifest import GraphManifest, GraphRecord, store_manifest
from pipeline.compile.sync import sync_cache
from pipeline.core.errors import ConfigError
from pipeline.io.storage import open_storage
from tests.compile.cache_cases import FILES, ONE, THREE, TWO, content_of, done_files, entries_of, name_of, write_entry
from tests.kit.s3 import MotoServer, lead_to
from tests.kit.storages import FAST


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The cache in the workspace `tmp_path`: one finished graph."""
    write_entry(tmp_path / "compile-cache", ONE, done_files("a"), age_s=3600)
    return tmp_path / "compile-cache"


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer("graphs") as server:
        yield server


@pytest.fixture
def s3_uri(server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh prefix."""
    lead_to(server.url, monkeypatch)
    yield f"s3://{server.bucket}/run-{secrets.token_hex(4)}"
    server.watcher = None


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["cache", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_status_lists_the_cache_and_the_graphs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = f"--workspace={root.parent}"
    lines = ask(capsys, "status", workspace)
    assert lines[0].startswith(f"compile cache file://{root} | 1 entries")
    assert lines[-1] == "nothing is compiled yet: trnpipe compile"
    graph = GraphRecord(
        key="k", phase="step", bucket="", batch_size=0, num_instructions=1, hlo_bytes=1, op_counts={}, compiles=1,
        compile_s=2.25,
    )  # fmt: skip
    manifest = GraphManifest(plan={"device": "NEURON"}, graphs=(graph, graph))
    store_manifest(open_storage(str(root.parent)), manifest)
    line = ask(capsys, "status", workspace)[-1]
    assert line == f"graphs {manifest.plan_id[:12]} | NEURON | 2 graphs, 4.5s compiling"


def test_repair_says_what_it_did(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.cache.live_compilers", list)
    write_entry(root, TWO, FILES[EntryState.LOCKED], age_s=3600)
    write_entry(root, THREE, FILES[EntryState.FAILED])
    first, second, last = ask(capsys, "repair", f"--workspace={root.parent}")
    assert (first, second) == (f"drop locked {TWO}", f"drop failed {THREE}")
    assert last == f"cache repair file://{root} | 2 actions"
    assert content_of(root) == entries_of(root, ONE)


def test_sync_from_a_machine_through_s3_to_an_empty_one(
    s3_uri: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_entry(root, TWO, done_files("b"))
    there, url = tmp_path / "there", f"--compile.sync-url={s3_uri}"
    assert "pushed 2 " in ask(capsys, "sync", f"--workspace={root.parent}", url)[0]
    assert "pulled 2 " in ask(capsys, "sync", f"--workspace={there}", url)[0]
    assert content_of(there / "compile-cache") == content_of(root)
    assert "in sync 2" in ask(capsys, "sync", f"--workspace={there}", url)[0]


def test_sync_without_two_sides_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "sync", f"--workspace={root.parent}"]) == ConfigError.exit_code
    captured = capsys.readouterr()
    assert captured.out == "" and "next: trnpipe cache sync --compile.cache-url" in captured.err


@pytest.mark.fault
def test_sigterm_ends_a_sync_with_143_and_the_next_goes_on(server: MotoServer, s3_uri: str, root: Path) -> None:
    for number in range(10, 30):
        write_entry(root, name_of(number), done_files(str(number)))
    words = ["cache", "sync", f"--workspace={root.parent}", f"--compile.sync-url={s3_uri}"]
    sent, started = list[str](), threading.Event()

    def stop_it(method: str, path: str) -> None:
        if method == "PUT" and not sent:
            sent.append(path)
            started.wait(60)
            process.send_signal(signal.SIGTERM)

    server.watcher = stop_it
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.set()
    out, err = process.communicate(timeout=120)
    assert sent and process.returncode == 143, err
    assert err.startswith("trnpipe cache: Preempted: stopped by SIGTERM while ") and "Traceback" not in err
    assert out == ""
    assert cli.main(words) == 0
    there = root.parent / "there"
    assert len(sync_cache(there, open_storage(s3_uri, retry=FAST)).pulled) == 21
    assert content_of(there) == content_of(root)


def test_a_reader_that_closes_early_is_no_failure(root: Path) -> None:
    line = f"{sys.executable} -m pipeline cache status --workspace '{root.parent}' | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""
