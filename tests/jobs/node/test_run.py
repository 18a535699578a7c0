"""One entry and its command, as processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs.node.run import Command, exit_code_of_return
from tests.jobs.node.entries import READY, clean_env, entry, job_env, post_mortem, python, read_until
from tests.jobs.targets.local.waiting import is_alive, until

pytestmark = pytest.mark.fault

SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"


def test_words_arrive_as_they_are(tmp_path: Path) -> None:
    words = ["two words", "", "'\"", "$HOME", "*", "--", "-x", "Straße 東京", "a\nb", "\\"]
    command = [sys.executable, "-m", "jobs.node", "--", *python(SHOW), *words]
    ended = subprocess.run(command, env=clean_env() | job_env(tmp_path), capture_output=True, text=True, check=True)
    assert (json.loads(ended.stdout), ended.stderr) == (words, "")
    assert not (tmp_path / "cycles/2026-11-20/jobs/post-mortem").exists()


def test_commands_of_the_pipeline_get_the_settings_of_the_cycle(tmp_path: Path) -> None:
    settings = tmp_path / "cycles/2026-11-20/jobs/settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"seed": 7}')
    trnpipe = tmp_path / "trnpipe"
    trnpipe.write_text(
        f"#!{sys.executable}\nimport sys\nwords = sys.argv[1:]\nfile = words[words.index('--config') + 1]\n"
        "print([word for word in words if word != file], open(file).read(), file)"
    )
    trnpipe.chmod(0o755)
    process = entry(str(trnpipe), "train", "--x", "1", env=job_env(tmp_path))
    out, _ = process.finish()
    assert out.startswith("""['train', '--x', '1', '--config'] {"seed": 7} """)
    assert not Path(out.split()[-1]).exists()
    script = entry(str(trnpipe), "launch", "--", "x.py", "--", "y", env=job_env(tmp_path))
    assert script.finish()[0].startswith("""['launch', '--config', '--', 'x.py', '--', 'y'] {"seed": 7} """)
    other = entry(*python(SHOW), "--x", env=job_env(tmp_path))
    assert json.loads(other.finish()[0]) == ["--x"]


def test_the_post_mortem_of_an_earlier_round_stays(tmp_path: Path) -> None:
    for env in (job_env(tmp_path), job_env(tmp_path, TRNJOBS_ROUND="2")):
        entry(*python("import sys; sys.exit(65)"), env=env).finish()
    folder = tmp_path / "cycles/2026-11-20/jobs/post-mortem"
    assert sorted(path.name for path in folder.iterdir()) == ["train-1-node0-round-2.json", "train-1-node0.json"]


def test_the_exit_code_passes_and_the_post_mortem_explains(tmp_path: Path) -> None:
    events = tmp_path / "cycles/2026-11-20/events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text("".join(f'{{"event": "e{i}"}}\n' for i in range(300)))
    env = job_env(tmp_path, AWS_BATCH_JOB_ATTEMPT="3", TRNPIPE_HF_TOKEN="hf_0123456789", TRNPIPE_SEED="7")
    code = "import os, sys; print('using', os.environ['TRNPIPE_HF_TOKEN'], flush=True); os.write(2, b'last words\\n')"
    process = entry(*python(f"{code}; sys.exit(65)"), env=env)
    out, err = process.finish()
    assert process.returncode == 65
    assert (out, "post-mortem: file://" in err) == ("using hf_0123456789\nlast words\n", True)
    found = post_mortem(tmp_path, attempt=3)
    assert (found["exit_code"], found["returncode"], found["job"], found["job_id"]) == (65, 65, "train", "job-1")
    assert found["log"] == ["using ***", "last words"]
    assert (len(found["events"]), found["events"][-1]) == (200, '{"event": "e299"}')
    assert found["environment"]["TRNPIPE_SEED"] == "7"
    assert "hf_0123456789" not in json.dumps(found)
    assert {"python", "torch", "trnpipe"} <= found["versions"].keys()


def test_failures_are_counted_without_preemptions_and_the_last_one_is_final(tmp_path: Path) -> None:
    """AWS Batch would make ten attempts, of which two may fail; array children and submissions count on their own."""
    codes = {1: 75, 2: 143, 3: 143, 4: 75}
    ends = list[int | None]()
    for attempt, code in codes.items():
        env = job_env(tmp_path, AWS_BATCH_JOB_ATTEMPT=str(attempt), TRNJOBS_ATTEMPTS="2")
        process = entry(*python(f"import sys; sys.exit({code})"), env=env)
        _, err = process.finish()
        ends.append(process.returncode)
    assert (ends, "2 attempts have failed, which is the limit" in err) == ([75, 143, 143, 69], True)
    for more in ({"AWS_BATCH_JOB_ARRAY_INDEX": "3"}, {"TRNJOBS_ROUND": "2"}):
        again = entry(*python("import sys; sys.exit(75)"), env=job_env(tmp_path, TRNJOBS_ATTEMPTS="2", **more))
        again.finish()
        assert again.returncode == 75


def test_a_failure_that_cannot_be_counted_is_retried(tmp_path: Path) -> None:
    (tmp_path / "cycles/2026-11-20/jobs").mkdir(parents=True)
    (tmp_path / "cycles/2026-11-20/jobs/post-mortem-failures").write_text("no folder")
    process = entry(*python("import sys; sys.exit(75)"), env=job_env(tmp_path, TRNJOBS_ATTEMPTS="1"))
    assert "could not count this failure" in process.finish()[1]
    assert process.returncode == 75


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once(tmp_path: Path, signum: signal.Signals) -> None:
    code = f"""
import signal, sys, time
told = []
signal.signal({int(signum)}, lambda *_: told.append(1))
print("ready", flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.4)
print("told", len(told), flush=True)
sys.exit(143)
"""
    process = entry(*python(code), env=job_env(tmp_path))
    read_until(process, "ready")
    process.send_signal(signum)
    process.send_signal(signum)
    out, _ = process.finish()
    assert ("told 1" in out, process.returncode) == (True, 143)
    assert not (tmp_path / "cycles/2026-11-20/jobs/post-mortem").exists()


def test_one_that_does_not_stop_shows_its_stacks_and_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_stacks = Command.request_stacks

    def ask_and_wait(command: Command) -> None:
        """A busy machine may need longer than the second before the kill."""
        request_stacks(command)
        until(lambda: any("hangs_here" in text for text in command.stacks().values()), "its stacks")

    monkeypatch.setattr(Command, "request_stacks", ask_and_wait)  # the entry is a fork of this process
    grandchild = "import time; time.sleep(100)"
    code = f"""
import signal, subprocess, sys, time
from pipeline.proc.signals import enable_stack_dumps
enable_stack_dumps()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def hangs_here():
    time.sleep(100)
subprocess.Popen([sys.executable, "-c", {grandchild!r}], start_new_session=True)
print("ready", flush=True)
hangs_here()
"""
    process = entry(*python(code), env=job_env(tmp_path, TRNJOBS_GRACE_S="1.5"))
    read_until(process, "ready")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    process.send_signal(signal.SIGTERM)
    _, err = process.finish()
    assert process.returncode == 143
    assert "not stopped within 1.5 s" in err
    until(lambda: not any(is_alive(one.pid) for one in family), "the end of all it started")
    found = post_mortem(tmp_path)
    assert found["killed"]
    assert [pid for pid, text in found["stacks"].items() if "hangs_here" in text] == [str(family[0].pid)]
    assert {row["pid"] for row in found["processes"]} == {one.pid for one in family}


def test_outside_of_a_cycle_it_only_runs_the_command() -> None:
    process = entry(*python(READY + "sys.exit(1)"), env={})
    out, err = process.finish()
    assert (out, err, process.returncode) == ("ready\n", "", 1)


def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """As PID 1 the kernel drops signals without a handler, and orphans are ours to reap."""
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    code = """
import os, signal, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)  # an orphan once its parent has gone
    os._exit(0)
os.wait()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("ready", os.getppid(), flush=True)
time.sleep(100)
"""
    command = [*words, sys.executable, "-m", "jobs.node", "--", *python(code)]
    env = clean_env() | job_env(tmp_path)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as unshare:
        assert unshare.stdout is not None
        assert unshare.stdout.readline() == "ready 1\n"
        [init] = psutil.Process(unshare.pid).children()
        init.terminate()
        assert unshare.wait(timeout=300) == 143


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT), 75),
        ((signal.SIGTERM, signal.SIGINT), 143),
        ((signal.SIGILL, signal.SIGUSR1), 1),
    ],
)
def test_codes_pass_and_signals_become_codes(signals: tuple[signal.Signals, ...], code: int) -> None:
    assert [exit_code_of_return(-signum) for signum in signals] == [code] * len(signals)
    codes = [0, 1, 65, 70, 74, 75, 78, 80, 143]
    assert [exit_code_of_return(one) for one in codes] == codes
