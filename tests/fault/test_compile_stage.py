"""The compile stage end to end: it drives Neuron's tool (a fake one, over real trial runs), alone and on two nodes."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import psutil
import pytest

from pipeline.compile.cache import list_entries
from pipeline.compile.manifest import GraphManifest, load_manifests, store_manifest
from pipeline.io.storage import open_storage
from pipeline.parallel.world import TRACE_FILE
from tests.backends.xla_process import needs_xla
from tests.compile.fake_neuron.toolchain import ToolChain
from tests.fault.harness import CYCLE, ON_XLA, Place, Run, closing_places, copy_of_prepared
from tests.fault.s3_server import S3Server
from tests.kit.ports import free_port
from tests.kit.s3 import lead_to

pytestmark = [needs_xla, pytest.mark.slow]

NUM_GRAPHS = 3
DRIVEN = ("--compile.tool=neuron", "--compile.time-limit-s=200")
ON_TWO = (*DRIVEN, "--train.micro-batch-size=12", "--train.candidates-per-query=2")


@dataclass
class Machine:
    """A computer with Neuron's tools and an empty cache, at work on a workspace."""

    place: Place
    tools: ToolChain
    flags: tuple[str, ...] = DRIVEN
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *flags: str, fault: str = "", **env: str) -> Run:
        fakes = self.tools.env(fault, FAKE_NEURON_GRAPHS=str(NUM_GRAPHS))
        ours = {name: fakes[name] for name in fakes if name == "PATH" or name.startswith("FAKE_NEURON_")}
        self.place.env = {**ours, "TRNPIPE_COMPILE__CACHE_URL": str(self.tools.cache), **self.env, **env}
        return self.place.start("compile", *self.flags, *flags)

    def run(self, *flags: str, fault: str = "", code: int = 0, **env: str) -> Run:
        return ended(self.start(*flags, fault=fault, **env), code)

    @property
    def scratch(self) -> Path:
        return self.place.scratch

    def manifests(self) -> list[GraphManifest]:
        return load_manifests(self.place.storage)

    def repairs(self) -> str:
        """What was repaired, as told in the events."""
        return "\n".join(chain.from_iterable(event["actions"] for event in self.place.events("cache_repaired")))

    def num_trials(self) -> int:
        return len(list(self.scratch.glob("compile/attempt-*")))

    def forget_trials(self) -> None:
        shutil.rmtree(self.scratch / "compile")

    def assert_in_order(self, *done: int) -> None:
        """No process, lock or half entry is left; these graphs are compiled."""
        assert self.tools.processes() == []
        assert self.tools.unclean() == []
        assert [index for index in range(NUM_GRAPHS) if self.tools.is_done(index)] == list(done)

    def assert_nothing_published(self) -> None:
        assert self.manifests() == []
        assert self.place.storage.stat(f"cycles/{CYCLE}/compile/result.json") is None

    def assert_published(self) -> GraphManifest:
        """A manifest of the traced graphs with all entries of the cache, and the result that names it."""
        (manifest,) = self.manifests()
        assert {graph.phase for graph in manifest.graphs} >= {"start", "evaluate"}
        assert set(manifest.cache_entries) == {self.tools.key(index) for index in range(NUM_GRAPHS)}
        result = self.place.result("compile")
        assert result["outputs"] == {"manifest": manifest.key}
        assert result["inputs"] == {"plan": manifest.plan_id}
        assert (result["status"], result["figures"]["graphs"]) == ("done", len(manifest.graphs))
        return manifest


def ended(run: Run, code: int = 0) -> Run:
    seen = run.wait()
    assert seen == code, f"exit {seen}, expected {code}\n{run.out[-3000:]}\n{run.err[-3000:]}"
    return run


def is_tracing(run: Run, *, driven: bool) -> bool:
    """True when the process that traces, the run itself or its trial run, has loaded the device's library."""
    try:
        top = psutil.Process(run.process.pid)
        family = [process for process in top.children(recursive=True) if TRACE_FILE in process.environ()]
        return any("_XLAC" in Path(f"/proc/{one.pid}/maps").read_text() for one in (family if driven else [top]))
    except (OSError, psutil.Error):
        return False


def terminated(run: Run, condition: Callable[[], bool]) -> Run:
    """SIGTERM when the condition holds: exit 143 within 20 s, by the orderly way out."""
    assert run.until(condition, every_s=0.2), f"ended before, exit {run.process.returncode}\n{run.err[-3000:]}"
    assert run.terminate() == 143, run.err[-3000:]
    assert "Preempted: stopped by SIGTERM while" in run.err
    assert "Traceback" not in run.err
    return run


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Place]]:
    yield from closing_places(copy_of_prepared, tmp_path_factory.mktemp("places"))


@pytest.fixture(scope="module")
def machine(places: Callable[..., Place], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Machine]]:
    """machine(flags, workspace of another machine, environment)"""
    made: list[Machine] = []

    def make(*flags: str, beside: Machine | None = None, env: dict[str, str] | None = None) -> Machine:
        folder = tmp_path_factory.mktemp("machine")
        here = places("xla", ON_XLA) if beside is None else Place(beside.place.workspace, folder, beside.place.flags)
        made.append(Machine(here, ToolChain(folder / "tools"), flags or DRIVEN, env or {}))
        return made[-1]

    yield make
    for one in made:
        one.place.close()


@pytest.fixture(scope="module")
def first(machine: Callable[..., Machine], s3: S3Server) -> Machine:
    """A machine that has compiled everything and shared it."""
    one = machine(*DRIVEN, f"--compile.sync-url=s3://{s3.bucket}/graphs", env=s3.env)
    one.run()
    return one


def test_one_run_compiles_the_next_has_nothing_to_do_the_third_what_is_lost(first: Machine) -> None:
    manifest = first.assert_published()
    assert all(manifest.cache_entries.values())
    first.assert_in_order(0, 1, 2)
    assert "3 cache entries (3 compiled, " in first.place.runs[0].out
    assert "pushed 3 " in first.place.runs[0].out
    names = [event["event"] for event in first.place.events() if event.get("stage") != "prepare"]
    assert names[-3:] == ["stage_started", "graph_compiled", "stage_finished"]

    first.forget_trials()
    first.place.storage.delete_prefix(f"cycles/{CYCLE}/compile")  # as in the next cycle
    again = first.run("--compile.sync-url=")
    assert f"compile: already done, {len(manifest.graphs)} graphs" in again.out
    assert (first.num_trials(), len(first.tools.compiles())) == (0, NUM_GRAPHS)
    assert first.place.events()[-1]["event"] == "stage_skipped"
    first.assert_published()

    slow = dict.fromkeys(manifest.cache_entries, 40.0)
    store_manifest(first.place.storage, manifest.model_copy(update={"cache_entries": slow}))
    shutil.rmtree(first.tools.entry(1))
    third = first.run("--compile.sync-url=")
    assert "3 cache entries (1 compiled, 2 already in the cache)" in third.out
    assert first.tools.compiles()[NUM_GRAPHS:] == [first.tools.entry(1).name]
    now = first.assert_published().cache_entries
    assert {name for name, seconds in now.items() if seconds != 40.0} == {first.tools.key(1)}
    assert first.repairs() == ""


def test_an_empty_machine_starts_warm(first: Machine, machine: Callable[..., Machine]) -> None:
    other = machine(*first.flags, beside=first, env=first.env)
    run = other.run()
    assert "pulled 3 " in run.out and "already done" in run.out
    assert (other.num_trials(), other.tools.compiles()) == (0, [])
    other.assert_in_order(0, 1, 2)


def test_a_refused_graph_ends_the_stage_but_not_the_others_work(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    shared = f"file://{tmp_path}/shared"
    here = machine(*DRIVEN, f"--compile.sync-url={shared}")
    run = here.run(fault="fail:1", code=78)
    assert "NCC_EVRF007" in run.err
    here.assert_in_order(0, 2)
    here.assert_nothing_published()
    assert f"drop failed {here.tools.key(1)}" in here.repairs()
    assert {entry.key for entry in list_entries(open_storage(shared))} == {here.tools.key(0), here.tools.key(2)}


@pytest.mark.thorough
def test_sigterm_in_the_trial_run_and_in_a_compile(machine: Callable[..., Machine]) -> None:
    here = machine()
    run = here.start()
    terminated(run, lambda: is_tracing(run, driven=True))
    here.assert_in_order()
    here.assert_nothing_published()

    run = here.start(fault="hang-compile")
    terminated(run, (here.tools.state / "hangs").exists)
    here.assert_in_order()
    here.assert_nothing_published()
    assert here.place.events()[-1]["event"] == "stage_stopped"
    assert "drop locked" in here.repairs()

    here.run()
    here.assert_in_order(0, 1, 2)
    here.assert_published()


def two_nodes(machine: Callable[..., Machine], job: str, *flags: str, env: dict[str, str]) -> list[Machine]:
    """The nodes of one job, each with a disk of its own."""
    nodes: list[Machine] = []
    port = str(free_port())
    for index in range(2):
        words = {
            "TRNJOBS_JOB_ID": job,
            "TRNJOBS_ATTEMPT": "1",
            "TRNJOBS_NODES": "2",
            "TRNJOBS_NODE": str(index),
            "TRNJOBS_MAIN": "127.0.0.1",
            "MASTER_PORT": port,
        }
        nodes.append(machine(*ON_TWO, *flags, beside=nodes[0] if nodes else None, env={**env, **words}))
    return nodes


@pytest.mark.thorough
def test_two_nodes_run_the_trial_together_and_again_for_the_one_that_crashed(
    machine: Callable[..., Machine], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(s3.url, monkeypatch)
    shared = f"s3://{s3.bucket}/two-nodes"
    main, other = two_nodes(machine, "good", f"--compile.sync-url={shared}", env=s3.env)
    runs = [main.start(fault="crash"), other.start()]
    for run in runs:
        ended(run)
    for node in (main, other):
        node.assert_in_order(0, 1, 2)
        assert node.num_trials() == 2
    assert "unlock" in main.repairs()
    assert main.assert_published().plan["world_size"] == 2
    assert "cache entries (" not in runs[1].out  # the main node publishes, alone
    assert len(list_entries(open_storage(shared))) == NUM_GRAPHS
    assert len(main.place.events("graph_compiled")) == 1


def test_a_node_that_fails_ends_the_other(machine: Callable[..., Machine]) -> None:
    """Before its trial run, for which the other's waits."""
    main, other = two_nodes(machine, "bad", env={})
    (other.tools.bin / "neuron_parallel_compile").unlink()
    runs = [main.start(), other.start()]
    assert "neuron_parallel_compile cannot be started" in ended(runs[1], 78).err
    assert "node 1 failed: ConfigError: neuron_parallel_compile cannot be started" in ended(runs[0], 75).err
    for node in (main, other):
        node.assert_in_order()
        node.assert_nothing_published()


@pytest.mark.thorough
def test_sigterm_in_an_ordinary_compile(places: Callable[..., Place]) -> None:
    here = places("xla", ON_XLA)
    run = here.start("compile")
    terminated(run, lambda: is_tracing(run, driven=False))
    assert load_manifests(here.storage) == []
    assert here.events()[-1]["event"] == "stage_stopped"
    here.run("compile")
    (manifest,) = load_manifests(here.storage)
    assert manifest.cache_entries == {}
    assert len(manifest.graphs) >= 3
