"""The fake Neuron tools have the habits of the real ones that the driver must cope with."""

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.compile.config import flags_hash
from tests.compile.fake_neuron.cache import VERSION
from tests.compile.fake_neuron.toolchain import ROOT, ToolChain

FLAGS = "--model-type=transformer"
SUFFIX = flags_hash((FLAGS,), compiler=VERSION, target="trn1")


@pytest.fixture
def tools(tmp_path: Path) -> ToolChain:
    return ToolChain(tmp_path / "tools", SUFFIX)


def run(
    tools: ToolChain, words: list[str], fault: str = "", *, generation: str = "new", **more: str
) -> "subprocess.CompletedProcess[str]":
    env = tools.env(
        fault,
        generation=generation,
        NEURON_CC_FLAGS=FLAGS,
        NEURON_COMPILE_CACHE_URL=str(tools.cache),
        USER="me",
        **more,
    )
    return subprocess.run(words, cwd=tools.folder, env=env, capture_output=True, text=True, check=False)


def compile_with(tools: ToolChain, *words: str, fault: str = "", **more: str) -> "subprocess.CompletedProcess[str]":
    work = f"--parallel_compile_workdir={tools.folder / 'work'}"
    return run(tools, ["neuron_parallel_compile", "--num_parallel=2", work, *words], fault, **more)


def test_swallows_options_of_the_run_command(tools: ToolChain) -> None:
    compile_with(tools, *tools.command(1), "--world_size", "4", "--log=DEBUG", "--mine", "x", "--num", "1")
    assert tools.trial()["argv"] == ["--graphs", "1", "--mine", "x"]


def test_layout_of_an_entry(tools: ToolChain) -> None:
    assert compile_with(tools, *tools.command(1)).returncode == 0
    entry = tools.entry(0)
    assert {path.name for path in entry.iterdir()} == {
        "model.hlo_module.pb",
        "compile_flags.json",
        "model.neff",
        "model.done",
    }
    assert json.loads((entry / "compile_flags.json").read_text()) == [FLAGS]


def test_deletes_its_work_folder(tools: ToolChain) -> None:
    (tools.folder / "work").mkdir()
    (tools.folder / "work" / "precious").touch()
    compile_with(tools, *tools.command(1))
    assert not (tools.folder / "work" / "precious").exists()
    assert (tools.folder / "work").is_dir()


def test_graphs_are_learnt_from_standard_output_alone(tools: ToolChain) -> None:
    ended = compile_with(tools, "sh", "-c", "fake_train --graphs 1 > /dev/null")
    assert ended.returncode == 0 and "No todo hlos found" in ended.stdout
    assert tools.compiles() == [] and not tools.is_done(0)


def test_the_exit_code_counts_failures_and_wraps(tools: ToolChain) -> None:
    assert compile_with(tools, *tools.command(3), fault="fail:1").returncode == 1
    assert (tools.entry(1) / "model.log").exists()
    many = compile_with(tools, *tools.command(256), fault="fail-all")
    assert many.returncode == 253  # two are compiled, one is a remembered failure
    other = ToolChain(tools.folder / "other", SUFFIX)
    assert compile_with(other, *other.command(256), fault="fail-all").returncode == 0


def test_a_failed_trial_run_is_1_and_compiles_nothing(tools: ToolChain) -> None:
    ended = compile_with(tools, *tools.command(3), fault="trial:65")
    assert ended.returncode == 1 and "There was an error in the training script." in ended.stdout
    assert tools.compiles() == [] and tools.entry(0).exists()


def test_a_locked_graph_is_skipped_in_silence(tools: ToolChain) -> None:
    tools.lock(0)
    ended = compile_with(tools, *tools.command(1))
    assert ended.returncode == 0 and "locked are 1" in ended.stdout and "Total graphs: 0" in ended.stdout


def test_a_failure_is_remembered_until_retried(tools: ToolChain) -> None:
    tools.poison(0)
    ended = compile_with(tools, *tools.command(1))
    assert ended.returncode == 0 and "Got a cached failed neff at" in ended.stdout and not tools.is_done(0)
    env = {"NEURON_CC_FLAGS": f"{FLAGS} --retry_failed_compilation"}
    words = ["env", f"NEURON_CC_FLAGS={env['NEURON_CC_FLAGS']}", "neuron_parallel_compile"]
    words += [f"--parallel_compile_workdir={tools.folder / 'work'}", *tools.command(1)]  # not that of all in /tmp
    assert run(tools, words).returncode == 0
    assert tools.is_done(0)  # the same entry: the option is no part of the key


def test_a_crash_leaves_a_lock_and_exit_code_0(tools: ToolChain) -> None:
    ended = compile_with(tools, *tools.command(1), fault="crash")
    assert ended.returncode == 0 and "sub-process" in ended.stdout and len(tools.unclean()) == 1


def test_max_retries(tools: ToolChain) -> None:
    compile_with(tools, *tools.command(1), fault="fail:0", NEURON_PARALLEL_COMPILE_MAX_RETRIES="2")
    assert len(tools.compiles()) == 3


def test_json_results_only_when_asked(tools: ToolChain) -> None:
    compile_with(tools, *tools.command(1))
    assert list(tools.folder.glob("*.json")) == []
    compile_with(tools, *tools.command(2), NEURON_PARALLEL_COMPILE_DUMP_RESULTS="1")
    (path,) = tools.folder.glob("neuron_parallel_compile_results_*.json")
    report = json.loads(path.read_text())
    assert report["compilation_summary"] == {"true": 1}  # an absent key is 0
    assert len(list(tools.folder.glob("total_neuron_parallel_compile_results_*.json"))) == 1


@pytest.mark.parametrize(
    ("generation", "prefix"), [("old", " INFO ||NEURON_CACHE||: Compile"), ("new", " [INFO]: Compile")]
)
def test_prefixes_of_both_generations(tools: ToolChain, generation: str, prefix: str) -> None:
    assert prefix in compile_with(tools, *tools.command(1), generation=generation).stdout


def test_collect_then_compile(tools: ToolChain) -> None:
    compile_with(tools, "--command=collect", *tools.command(2))
    assert tools.entry(1).exists() and tools.compiles() == []
    assert compile_with(tools, "--command=compile").returncode == 0
    assert tools.is_done(0) and tools.is_done(1)


def test_the_compiler_knows_its_flags(tools: ToolChain) -> None:
    hlo = tools.collect(0) / "model.hlo_module.pb"
    command = ["neuronx-cc", "compile", "--framework=XLA", "--target=trn1", str(hlo), "--output", "a.neff"]
    assert run(tools, [*command, "--optlevel=1"]).returncode == 0
    assert run(tools, [*command, "--optlevel", "O1"]).returncode != 0
    assert VERSION in run(tools, ["neuronx-cc", "--version"]).stdout


def test_the_package_does_not_know_the_fakes() -> None:
    for path in (ROOT / "pipeline").rglob("*.py"):
        assert "fake_neuron" not in path.read_text(encoding="utf-8"), path
