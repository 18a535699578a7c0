"""A script in one rank sees what `python script.py` shows it; its exit code, and the one code of all ranks."""

import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from pipeline.core.errors import EXIT_TABLE, DataError
from pipeline.parallel.launch import EXIT_DIR_VARIABLE, exit_code, ranks_exit_code, record_exit_code
from tests.kit.zygote import ROOT

SEEN = """
import multiprocessing, pickle, sys
import beside

def double(number):
    return 2 * number

if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __name__, beside.__file__, pickle.loads(pickle.dumps(double))(4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


def python(*words: str, folder: Path, exits: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "3", "RANK": "7"}
    env |= {EXIT_DIR_VARIABLE: str(exits)} if exits else {}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("words", [("parts/script.py", "--a", "-m"), ("-m", "parts.script", "b")])
def test_it_sees_what_python_shows_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "script.py").write_text(SEEN)
    for folder in (tmp_path, tmp_path / "parts"):
        (folder / "beside.py").write_text("")
    expected = python(*words, folder=tmp_path)
    assert expected.returncode == 0 and "[2, 4]" in expected.stdout, expected.stderr
    assert python("-m", "pipeline.parallel.launch", "rank", *words, folder=tmp_path).stdout == expected.stdout


OURS = "from pipeline.core.errors import DataError\nraise DataError('seen', expected='other', next_command='look')"


@pytest.mark.parametrize(
    ("text", "code", "err"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('too bad')", 1, "too bad\n"),
        ("import sys; sys.exit(-1)", 255, ""),
        (OURS, 65, "rank 7: DataError: seen\n  expected: other\n  next: look\n"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(0.2,)).start()", 0, ""),
    ],
)
def test_its_exit_code_is_kept_and_left_for_the_launcher(tmp_path: Path, text: str, code: int, err: str) -> None:
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "exits").mkdir()
    done = python("-m", "pipeline.parallel.launch", "rank", "script.py", folder=tmp_path, exits=tmp_path / "exits")
    assert (done.returncode, done.stderr) == (code, err)
    assert (tmp_path / "exits" / "local-rank-3").read_text() == str(code)


def test_a_traceback_is_that_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def low():\n    raise KeyError('x')\n\n\nlow()\n")
    plain = python("script.py", folder=tmp_path)
    done = python("-m", "pipeline.parallel.launch", "rank", "script.py", folder=tmp_path)
    assert done.returncode == plain.returncode == 1
    assert done.stderr == plain.stderr


def test_a_lost_peer_is_no_fault_of_the_script() -> None:
    import torch.distributed as dist

    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4242"
    assert exit_code(RuntimeError(gloo)) == exit_code(dist.DistBackendError("NCCL error")) == 75
    assert exit_code(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == exit_code(ValueError(gloo)) == 1
    assert exit_code(DataError("seen")) == 65
    assert exit_code(KeyboardInterrupt()) == 143


@pytest.mark.parametrize(
    ("codes", "stopped", "expected"),
    [
        ([0, 0], False, 0),
        ([0], True, 0),  # done before the signal arrived
        ([1, 75], False, 1),
        ([0, 75], False, 75),
        ([None, 75], False, 75),  # killed outright
        ([0, None], False, 75),
        ([143, 75], True, 143),
        ([None, 143], True, 143),
        ([-9, 1], False, 75),  # a bug that comes of the loss of a peer
        ([-11, 1], False, 1),
        ([7, 75], False, 7),
        ([7, None], True, 7),
        ([7, 1], False, 1),
        ([137, None], False, 75),  # as a shell says that its child was killed
        *(
            ([other, rule.exit_code], stopped, rule.exit_code)  # what must not be retried wins over anything
            for rule in EXIT_TABLE
            if not rule.retry
            for other, stopped in ((0, False), (1, True), (75, False), (143, True), (None, True), (-9, False))
        ),
    ],
)
def test_the_rank_that_says_most(codes: list[int | None], stopped: bool, expected: int) -> None:
    for order in permutations(codes):
        assert ranks_exit_code(order, stopped=stopped) == expected


def test_a_rank_leaves_its_code_for_the_launcher(tmp_path: Path) -> None:
    record_exit_code(74, {EXIT_DIR_VARIABLE: str(tmp_path), "LOCAL_RANK": "1", "RANK": "5"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"local-rank-1": "74"}
    record_exit_code(74, {})  # not under our launcher
    record_exit_code(74, {EXIT_DIR_VARIABLE: str(tmp_path / "gone")})
