"""`trnpipe cache`: what it says of healthy and sick caches, what it mends, and the exchange between two machines."""

import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pipeline import cli, commands
from pipeline.commands import ToolCall, cache
from pipeline.compile.cache import LOCK_DIR, Compilers, EntryState, Mount, Mounts
from pipeline.compile.cache_sync import sync_cache
from pipeline.compile.config import CompilerFlags, flags_hash
from pipeline.compile.manifest import GraphManifest, GraphRecord, store_manifest
from pipeline.core.errors import ConfigError, DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.settings import Settings
from tests.compile.cache_cases import (
    FILES,
    GRAPH,
    LOG,
    NEFF,
    NOW_S,
    OLDER,
    VERSION,
    content_of,
    done_files,
    entries_of,
    local_disk,
    name_of,
    nobody,
    somebody,
    write_entry,
)
from tests.s3 import MotoServer, lead_to
from tests.storages import FAST

OLD_S = 3600.0
FLAGS = flags_hash(CompilerFlags().tokens(), compiler="2.24.8799.0", target="trn1")
ONE, TWO, THREE, OLD = name_of(1, flags=FLAGS), name_of(2, flags=FLAGS), name_of(3, flags=FLAGS), name_of(4, OLDER)


def network() -> list[Mount]:
    return [Mount("/", "nfs4")]


def ask(
    action: str,
    workspace: Path | str,
    *,
    compilers: Compilers = nobody,
    mounts: Mounts = local_disk,
    keep: Sequence[str] = (),
    sync_url: str = "",
    cache_url: str = "",
    stop: StopSignal | None = None,
) -> tuple[int, list[str]]:
    """The exit code and the lines of one action, on a host of the test's choice at NOW_S."""
    base = Settings(workspace=str(workspace), storage=FAST)
    change = {"keep_versions": tuple(keep), "sync_url": sync_url, "cache_url": cache_url}
    settings = base.model_copy(update={"compile": base.compile.model_copy(update=change)})
    lines: list[str] = []
    host = cache.CacheHost(compilers, mounts, lambda: NOW_S)
    code = cache.run(settings, stop or StopSignal(), lines.append, ToolCall(action), host=host)
    return code, lines


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The cache in the workspace `tmp_path`: one finished graph."""
    write_entry(tmp_path / "compile-cache", ONE, done_files("a"), age_s=OLD_S)
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


def test_the_command_line_offers_what_there_is() -> None:
    assert commands.TOOLS["cache"].actions.keys() == cache.ACTIONS.keys()


# Status


def test_status_of_a_healthy_cache(root: Path) -> None:
    before = content_of(root)
    code, lines = ask("status", root.parent)
    assert code == 0
    assert lines[0].startswith(f"compile cache file://{root} | 1 entries, ") and "age 1h00m" in lines[0]
    assert lines[1] == "done 1 | failed 0 | locked 0 | collected 0 | incomplete 0"
    assert any(line.startswith(f"compiler {VERSION}: 1 entries") for line in lines)
    assert any(line.startswith(f"flags {FLAGS}: 1 entries") for line in lines)
    assert not any("warning" in line for line in lines)
    assert content_of(root) == before and not (root / LOCK_DIR).exists(), "status changes nothing"


def test_status_of_a_sick_cache_is_no_failure(root: Path) -> None:
    write_entry(root, TWO, FILES[EntryState.FAILED], age_s=OLD_S)
    write_entry(root, THREE, FILES[EntryState.LOCKED], age_s=OLD_S)
    code, lines = ask("status", root.parent)
    assert code == 0 and len(lines) == len(set(lines))
    assert lines[1] == "done 1 | failed 1 | locked 1 | collected 0 | incomplete 0"
    assert any(line.startswith(f"failed {TWO.key}") for line in lines)
    assert any(line.startswith(f"stale lock {THREE.key}") for line in lines)
    assert sum(line.startswith("warning: ") and line.endswith("trnpipe cache repair") for line in lines) == 2


def test_status_warns_of_a_cache_made_with_other_flags(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), done_files())
    (warning,) = [line for line in ask("status", "elsewhere", cache_url=str(tmp_path))[1] if "warning" in line]
    assert f"give hash {FLAGS}" in warning and "3cc9a3cb (--target=trn1 --model-type=transformer)" in warning


def test_status_lists_the_graphs_that_another_device_compiled(tmp_path: Path) -> None:
    assert ask("status", tmp_path)[1][-1] == "nothing is compiled yet: trnpipe compile"
    graph = GraphRecord(
        key="k", phase="step", bucket="", batch_size=0, num_instructions=1, hlo_bytes=1, op_counts={}, compiles=1,
        compile_s=2.25,
    )  # fmt: skip
    plans = [GraphManifest(plan={"device": device}, graphs=(graph, graph)) for device in ("CPU", "NEURON")]
    for manifest in plans:
        store_manifest(open_storage(str(tmp_path)), manifest)
    lines = [line for line in ask("status", tmp_path)[1] if line.startswith("graphs ")]
    assert len(lines) == 2
    for manifest in plans:
        (line,) = [line for line in lines if line.startswith(f"graphs {manifest.plan_id[:12]} | ")]
        assert f"| {manifest.plan['device']} | 2 graphs, 4.5s compiling | manifest " in line
        assert f"{(tmp_path / manifest.place).stat().st_size} B" in line
    write_entry(tmp_path / "compile-cache", ONE, done_files())
    assert not any(line.startswith("graphs ") for line in ask("status", tmp_path)[1]), "the cache says it better"


def test_status_of_a_damaged_manifest_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "compile-cache" / "graphs"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text("{")
    with pytest.raises(DataError, match=r"a\.json is not a graph manifest"):
        ask("status", tmp_path)


# Doctor


def test_the_doctor_of_a_healthy_cache(root: Path) -> None:
    write_entry(root, TWO, FILES[EntryState.COLLECTED], age_s=OLD_S)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    code, lines = ask("doctor", root.parent)
    assert code == 0 and lines[-1] == "doctor: healthy"
    assert "file system ext4, mounted at / | no compiler runs on this host" in lines
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def make_stale_lock(root: Path) -> None:
    write_entry(root, TWO, FILES[EntryState.LOCKED], age_s=OLD_S)


def make_failure(root: Path) -> None:
    write_entry(root, TWO, FILES[EntryState.FAILED], age_s=OLD_S)


def make_half(root: Path) -> None:
    write_entry(root, TWO, FILES[EntryState.INCOMPLETE], age_s=OLD_S)


def make_torn(root: Path) -> None:
    write_entry(root, ONE, {NEFF: b""}, age_s=OLD_S)


@pytest.mark.parametrize(
    ("make", "text", "first"),
    [
        (make_stale_lock, "stale locks, which block every process that needs those graphs: 1", ""),
        (
            make_failure,
            "cached compile failures, which are returned instead of compiling again: 1",
            f"read .*/{LOG} for the reason, then ",
        ),
        (make_half, "incomplete entries, left by a process that died: 1", ""),
        (make_torn, "incomplete entries, left by a process that died: 1", ""),
    ],
)
def test_the_doctor_names_each_problem_and_repair_mends_it(
    make: Callable[[Path], None], text: str, first: str, root: Path
) -> None:
    make(root)
    before = content_of(root)
    code, lines = ask("doctor", root.parent)
    assert content_of(root) == before
    assert code == DataError.exit_code == 65 and lines[-1] == "doctor: 1 problems"
    (problem,) = [line for line in lines if line.startswith("problem: ")]
    pattern = rf"problem: {text}\n  expected: .+\n  next: {first}trnpipe cache repair"
    assert re.fullmatch(pattern, problem), problem
    assert not any(line.startswith("warning") for line in lines), "said once, as a problem"
    assert ask("repair", root.parent)[0] == 0
    assert ask("doctor", root.parent)[1][-1] == "doctor: healthy"


def test_the_doctor_counts_all_problems(root: Path) -> None:
    make_stale_lock(root)
    for number, state in enumerate((EntryState.FAILED, EntryState.FAILED, EntryState.INCOMPLETE)):
        write_entry(root, name_of(10 + number, flags=FLAGS), FILES[state], age_s=OLD_S)
    code, lines = ask("doctor", root.parent, mounts=network)
    assert (code, lines[-1]) == (65, "doctor: 4 problems")
    assert "returned instead of compiling again: 2" in "\n".join(lines)


def test_the_doctor_finds_a_network_file_system(root: Path) -> None:
    code, lines = ask("doctor", root.parent, mounts=network)
    assert code == 65 and "file system nfs4, mounted at / | no compiler runs on this host" in lines
    (problem,) = [line for line in lines if line.startswith("problem: ")]
    assert "lies on nfs4" in problem and "a local disk" in problem and "trnpipe cache sync" in problem


def test_the_doctor_finds_other_flags(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), done_files(), age_s=OLD_S)
    code, lines = ask("doctor", "elsewhere", cache_url=f"file://{tmp_path}")
    assert code == 65
    (problem,) = [line for line in lines if line.startswith("problem: ")]
    assert f"give hash {FLAGS}" in problem and "next: trnpipe compile" in problem


def test_a_lock_of_a_living_compiler_is_no_problem(root: Path) -> None:
    make_stale_lock(root)
    code, lines = ask("doctor", root.parent, compilers=somebody)
    assert code == 0 and "compiling now: walrus_driver (pid 4711)" in lines
    assert f"left alone {TWO.key} | locked while walrus_driver (pid 4711) is alive" in lines
    assert "file system ext4, mounted at /" in lines


# Repair


def test_repair_of_a_stale_lock_and_of_a_remembered_failure(root: Path) -> None:
    make_stale_lock(root)
    write_entry(root, THREE, FILES[EntryState.FAILED], age_s=OLD_S)
    kept = entries_of(root, ONE)
    code, lines = ask("repair", root.parent)
    assert code == 0
    assert any(line.startswith(f"unlock {TWO.key}") for line in lines)
    assert any(line.startswith(f"drop failed {THREE.key}") for line in lines)
    assert content_of(root) == {**kept, f"{TWO.key}/{GRAPH}": b"graph"}
    again = ask("repair", root.parent)[1]
    assert "0 actions" in again[0] and len(again) == 1


def test_old_compilers_are_pruned_only_when_asked(root: Path) -> None:
    write_entry(root, OLD, done_files(), age_s=OLD_S)
    ask("repair", root.parent)
    assert (root / OLD.key).exists()
    with pytest.raises(ConfigError, match=r"no entry of the compile cache is of 9\.9\.9"):
        ask("repair", root.parent, keep=["9.9.9"])
    lines = ask("repair", root.parent, keep=[VERSION])[1]
    assert any(line.startswith(f"prune {OLD.key}") for line in lines)
    assert not (root / OLD.key).exists() and (root / ONE.key).exists()


def test_repair_refuses_a_root_that_other_machines_may_write(root: Path) -> None:
    make_stale_lock(root)
    before = content_of(root)
    with pytest.raises(ConfigError, match="lies on nfs4"):
        ask("repair", root.parent, mounts=network)
    assert content_of(root) == before


def test_a_stopped_repair_is_preempted(root: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted):
        ask("repair", root.parent, stop=stop)


# A live cache on S3


def test_a_cache_on_s3_is_examined_and_repaired(s3_uri: str) -> None:
    storage = open_storage(f"{s3_uri}/compile-cache", retry=FAST)
    for name, files in ((ONE, done_files()), (TWO, FILES[EntryState.FAILED]), (THREE, FILES[EntryState.LOCKED])):
        for file, data in files.items():
            storage.write_bytes(f"{name.key}/{file}", data)
    assert ask("status", s3_uri)[1][1] == "done 1 | failed 1 | locked 1 | collected 0 | incomplete 0"
    code, lines = ask("doctor", s3_uri)
    assert (code, lines[-1]) == (65, "doctor: 1 problems")
    assert f"left alone {THREE.key} | locked: another node may be at work on it" in lines
    assert f"{s3_uri}/compile-cache/{TWO.key}/{LOG}" in "\n".join(lines)
    assert any(line.startswith(f"drop failed {TWO.key}") for line in ask("repair", s3_uri)[1])
    code, lines = ask("doctor", s3_uri)
    assert (code, lines[-1]) == (0, "doctor: healthy")
    with pytest.raises(ConfigError, match="is not on this machine"):
        ask("sync", s3_uri, sync_url=f"{s3_uri}/exchange")


# Sync


def test_sync_from_a_machine_through_s3_to_an_empty_one(s3_uri: str, root: Path, tmp_path: Path) -> None:
    write_entry(root, TWO, done_files("b"), age_s=OLD_S)
    write_entry(root, THREE, FILES[EntryState.FAILED], age_s=OLD_S)
    there = tmp_path / "there"
    code, lines = ask("sync", root.parent, sync_url=s3_uri)
    assert code == 0 and lines[0].startswith(f"cache sync file://{root} <-> {s3_uri}") and "pushed 2 " in lines[0]
    code, lines = ask("sync", there, sync_url=s3_uri)
    assert code == 0 and "pulled 2 " in lines[0]
    assert content_of(there / "compile-cache") == entries_of(root, ONE, TWO)
    assert ask("doctor", there)[0] == 0
    assert "in step 2" in ask("sync", there, sync_url=s3_uri)[1][0]


def test_a_pruned_compiler_does_not_come_back(s3_uri: str, root: Path) -> None:
    write_entry(root, OLD, done_files(), age_s=OLD_S)
    ask("sync", root.parent, sync_url=s3_uri)
    ask("repair", root.parent, keep=[VERSION])
    assert "pulled 0 " in ask("sync", root.parent, sync_url=s3_uri, keep=[VERSION])[1][0]
    assert not (root / OLD.key).exists()


def test_sync_without_a_place_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "sync", "--workspace", str(root.parent)]) == ConfigError.exit_code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == (
        "trnpipe cache: ConfigError: compile.sync_url is empty: no shared location to exchange compiled graphs\n"
        "  expected: s3://bucket/prefix, the same on all machines\n"
        "  next: trnpipe cache sync --compile.sync-url s3://bucket/prefix\n"
    )


@pytest.mark.parametrize("url", ["workspace", "file"])
def test_sync_with_itself_is_refused(url: str, root: Path) -> None:
    with pytest.raises(ConfigError, match="is the storage that caches are synced with"):
        ask("sync", root.parent, sync_url=str(root) if url == "workspace" else f"file://{root}")


@pytest.mark.fault
def test_sigterm_ends_a_sync_with_143_and_the_next_goes_on(server: MotoServer, s3_uri: str, root: Path) -> None:
    for number in range(10, 30):
        write_entry(root, name_of(number, flags=FLAGS), done_files(str(number)), age_s=OLD_S)
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
    assert len(sync_cache(there, open_storage(s3_uri, retry=FAST), mounts=local_disk).pulled) == 21
    assert content_of(there) == content_of(root)


# The command itself


def test_the_command_prints_and_returns_the_code(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--workspace={root.parent}", "--compile.target=trn2"]
    assert cli.main(["cache", "status", *words]) == 0
    assert capsys.readouterr().out.startswith(f"compile cache file://{root} | 1 entries")
    assert cli.main(["cache", "doctor", *words]) == 65
    captured = capsys.readouterr()
    assert captured.out.endswith("doctor: 1 problems\n") and captured.err == ""


def test_a_reader_that_closes_early_is_no_failure(root: Path) -> None:
    line = f"{sys.executable} -m pipeline cache status --workspace '{root.parent}' | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""
