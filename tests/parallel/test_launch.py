"""`trnpipe launch`: ranks of a script that knows nothing of us, here and on two nodes, and the one exit code."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.core.stop import StopSignal
from pipeline.parallel.launch import forward_output, launch, may_restart
from pipeline.parallel.world import NUM_NODES
from tests.kit.ports import free_port
from tests.kit.zygote import ROOT, Forked

WAIT_S = 120.0  # generous, machines may be loaded

ENDING = """
import os, signal, sys, time
from pathlib import Path
rank, mode, folder = int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2])

def leave(*_):
    (folder / f"told-{rank}").touch(exist_ok=False)
    sys.exit(5)

if mode == "handles" or mode == "killed" and rank == 0:
    signal.signal(signal.SIGTERM, leave)
(folder / f"here-{rank}").touch()
while not (folder / "here-0").exists() or not (folder / "here-1").exists():
    time.sleep(0.02)
if rank == 1:
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "fails":
        raise ValueError("its own fault")
    if mode == "leaves":
        os._exit(7)
    if mode == "refuses":
        import trnpipe
        trnpipe.resolve([Path("no-such-file.toml")], {})
while True:
    time.sleep(0.02)
"""


def start(folder: Path, *words: object, processes: int = 2, **env: str) -> Forked:
    """`trnpipe launch`, its output in files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["launch", f"--launch.processes={processes}", "--", *map(str, words)]
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return Forked("pipeline", command, env=whole, cwd=folder, stdout=out, stderr=err)


def ending(folder: Path, mode: str) -> Forked:
    script = folder / "ending.py"
    script.write_text(ENDING)
    started = start(folder, "python", script, mode, folder)
    wait_for(lambda: len(list(folder.glob("here-*"))) == 2, [started], folder / "err")
    return started


def wait_for(seen: Callable[[], bool], runs: Sequence[Forked], log: Path) -> None:
    """Asserts that none of `runs` has ended before."""
    limit = time.monotonic() + WAIT_S
    while True:
        codes = [run.poll() for run in runs]  # before the look: what is waited for may end them
        if seen():
            return
        assert not any(code is not None for code in codes) and time.monotonic() < limit, log.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("killed", 75, "rank 1 (process "),
        pytest.param("refuses", 78, "rank 1: ConfigError: --config no-such-file.toml", marks=pytest.mark.thorough),
        pytest.param("fails", 1, "ValueError: its own fault", marks=pytest.mark.thorough),
        pytest.param("leaves", 7, "exited with 7", marks=pytest.mark.thorough),
    ],
)
def test_one_code_when_a_rank_ends_badly(tmp_path: Path, mode: str, code: int, said: str) -> None:
    run = ending(tmp_path, mode)
    assert run.wait(WAIT_S) == code
    err = (tmp_path / "err").read_text()
    assert said in err
    assert ("Traceback" in err) == (mode == "fails")
    assert (tmp_path / "told-0").exists() == (mode == "killed")


@pytest.mark.parametrize(
    ("codes", "env", "expected"),
    [
        ((0, -signal.SIGKILL), {}, True),
        ((-signal.SIGSEGV, 75), {}, True),
        ((None, 75), {}, False),
        ((75, -signal.SIGABRT), {}, False),
        ((0, -signal.SIGKILL), {NUM_NODES: "2"}, False),
    ],
)
def test_only_a_killed_rank_starts_again(codes: tuple[int | None, ...], env: dict[str, str], *, expected: bool) -> None:
    assert may_restart(codes, env) == expected


def test_ranks_are_killed_too_often(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "ending.py"
    script.write_text("import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)")
    assert launch(["rank", str(script)], 2, StopSignal(), module="pipeline.parallel.launch", restarts=1) == 75
    err = capfd.readouterr().err
    assert err.count("starting all ranks of this node again (1 of 1)") == 1 and err.count("was killed by SIGKILL") == 2


TALKING = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.new_group([0, 1])
dist.barrier()
print("first", end=" ")
print("line\\nsecond line")
print(os.environ["MASTER_ADDR"], file=sys.stderr)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_a_machine_whose_name_has_no_address(tmp_path: Path) -> None:
    """Each line has the number of its rank, and gloo's own are left out."""
    (tmp_path / "talking.py").write_text(TALKING)
    renamed = ["unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname no-such-host.invalid; exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*renamed, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of host names are not allowed here")
    command = [sys.executable, "-m", "pipeline", "launch", "--launch.processes=2", "--", "talking.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*renamed, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{rank}] {text}" for rank in (0, 1) for text in ("first line", "second line")]
    assert {f"[{rank}] 127.0.0.1" for rank in (0, 1)} <= set(done.stderr.splitlines())


def test_output_is_passed_on_as_it_comes() -> None:
    source, given = os.pipe()
    taken, target = os.pipe()
    passing = threading.Thread(target=forward_output, args=(source, target))
    passing.start()
    gloo = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    for sent, expected in (
        (b"step 1", b"step 1"),
        (b", loss 2\n[Glo", b", loss 2\n"),
        (gloo[4:] + b"[Gl\n" + gloo[:20], b"[Gl\n"),
        (gloo[20:] + b"\r50 %", b"\r50 %"),
    ):
        os.write(given, sent)
        found = b""
        while len(found) < len(expected):
            found += os.read(taken, 100)
        assert found == expected
    os.close(given)
    passing.join(WAIT_S)
    os.close(target)
    assert os.read(taken, 100) == b""
    os.close(taken)


@pytest.mark.thorough
def test_a_script_that_handles_the_stop_gets_it_once_in_each_rank_and_its_own_code_is_kept(tmp_path: Path) -> None:
    run = ending(tmp_path, "handles")
    run.terminate()
    assert run.wait(WAIT_S) == 5
    assert len(list(tmp_path.glob("told-*"))) == 2
    assert "stopped by SIGTERM" in (tmp_path / "err").read_text()


def test_two_nodes_are_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    # The main node's own address, elsewhere.
    process_group = {"TRNJOBS_NODES": "2", "MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}
    words = (tmp_path / "ending.py", "waits", tmp_path)
    nodes = [
        start(tmp_path / str(node), *words, processes=1, TRNJOBS_NODE=str(node), **process_group) for node in (0, 1)
    ]
    wait_for(lambda: len(list(tmp_path.glob("here-*"))) == 2, nodes, tmp_path / "0" / "err")
    for node in nodes:
        node.terminate()
    assert [node.wait(WAIT_S) for node in nodes] == [143, 143]
    for folder in ("0", "1"):
        err = (tmp_path / folder / "err").read_text()
        assert "stopped by SIGTERM" in err and "Traceback" not in err


TIMEOUT_S = 3.0
LOSING = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo")
Path(f"joined-{dist.get_rank()}").touch()
if dist.get_rank() == 1:
    while not all(Path(f"joined-{rank}").exists() for rank in (0, 2)):  # or they lose it while they still connect
        time.sleep(0.01)
    Path("here").touch()
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else time.sleep(600)
if sys.argv[1] == "asleep":  # not earlier: joining takes the time that it takes
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=float(sys.argv[2])), dist.group.WORLD)
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("mode", ["killed", "asleep"])
def test_a_rank_that_loses_a_peer_ends_with_75(tmp_path: Path, mode: str) -> None:
    """Long before the library's 30 minutes, or after its time-out; and by itself: one that hangs is ended with 1."""
    (tmp_path / "losing.py").write_text(LOSING)
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    ranks = []
    with (tmp_path / "log").open("wb") as log:
        for rank in range(3):
            mine = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            words = ["rank", str(tmp_path / "losing.py"), mode, str(TIMEOUT_S)]
            ranks.append(Forked("pipeline.parallel.launch", words, env=mine, cwd=tmp_path, stdout=log, stderr=log))
    try:
        wait_for((tmp_path / "here").exists, [ranks[1]], tmp_path / "log")
        assert ranks[0].wait(WAIT_S) == ranks[2].wait(WAIT_S) == 75, (tmp_path / "log").read_text()
        assert ranks[1].wait(WAIT_S) == -9 if mode == "killed" else ranks[1].poll() is None
    finally:
        for one in ranks:
            one.kill()
            one.wait(WAIT_S)
