"""When Neuron's tool is driven, and that training compiles with the flags and the cache of the compile stage."""

from pathlib import Path

import pytest

from pipeline.compile.config import CompileConfig, CompilerFlags
from pipeline.compile.neuron_tool import drives_tool, neuron_environment, use_neuron_cache
from pipeline.parallel.world import TRACE_FILE

NEURON, CPU = {"PJRT_DEVICE": "NEURON"}, {"PJRT_DEVICE": "CPU"}
FLAGS = CompilerFlags(auto_cast="matmult", optlevel=2)


@pytest.mark.parametrize(
    ("tool", "backend", "env", "expected"),
    [
        ("auto", "xla", NEURON, True),
        ("auto", "auto", NEURON, True),
        ("auto", "cpu", NEURON, False),
        ("auto", "cuda", NEURON, False),
        ("auto", "xla", CPU, False),
        ("neuron", "xla", CPU, True),
        ("none", "xla", NEURON, False),
        ("auto", "xla", NEURON | {TRACE_FILE: "/f"}, False),  # the trial run does not drive itself once more
        ("neuron", "xla", CPU | {TRACE_FILE: "/f"}, False),
    ],
)
def test_where_the_tool_is_driven(tool: str, backend: str, env: dict[str, str], expected: bool) -> None:
    assert drives_tool(CompileConfig.model_validate({"tool": tool}), backend, env) is expected


@pytest.mark.parametrize("cache_url", ["", "s3://bucket/cache", "file:///disk/cache"])
def test_training_has_the_flags_and_the_cache_of_the_compile_stage(tmp_path: Path, cache_url: str) -> None:
    config = CompileConfig(flags=FLAGS, cache_url=cache_url)
    workspace = f"file://{tmp_path}"
    compiling = neuron_environment(NEURON, config, cache_root=config.cache_root(workspace), retry_failed=False)
    training = dict(NEURON)
    assert use_neuron_cache(config, workspace, "xla", training) == ""
    for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"):
        assert training[name] == compiling[name]
    assert training["NEURON_CC_FLAGS"].split() == list(FLAGS.tokens())


def test_other_flags_in_the_environment_are_replaced_and_told() -> None:
    env = NEURON | {"NEURON_CC_FLAGS": "--optlevel=3 --cache_dir=/elsewhere"}
    told = use_neuron_cache(CompileConfig(), "/w", "auto", env)
    assert "--optlevel=3 --cache_dir=/elsewhere" in told and "--optlevel=1" in told
    assert env["NEURON_CC_FLAGS"] == CompilerFlags().text()
    assert use_neuron_cache(CompileConfig(), "/w", "auto", env) == ""  # as in a rank of its own


@pytest.mark.parametrize("env", [CPU, NEURON | {TRACE_FILE: "/f", "NEURON_CC_FLAGS": "--optlevel=1 --retry_failed"}])
def test_elsewhere_and_in_a_trial_run_the_environment_stays(env: dict[str, str]) -> None:
    before = dict(env)
    assert use_neuron_cache(CompileConfig(flags=FLAGS), "/w", "xla", env) == ""
    assert env == before


def test_another_device_is_left_alone() -> None:
    env = dict(NEURON)
    use_neuron_cache(CompileConfig(), "/w", "cpu", env)
    assert env == NEURON
