"""How neuron_parallel_compile is called: its arguments, its environment and the script it runs."""

import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from pipeline.backends import on_neuron
from pipeline.compile.config import CompileConfig
from pipeline.parallel.world import TRACE_FILE

PROGRAM = "neuron_parallel_compile"
SCORING = "TRN_TRACE_SCORING"
"""Environment of a trial run that traces evaluation and embedding alone."""
NOT_INHERITED = ("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "NEURON_EXTRACT_GRAPHS_ONLY")


def drives_tool(config: CompileConfig, backend: str, env: Mapping[str, str]) -> bool:
    """True where neuron_parallel_compile is to be run over a trial run, and this is not that trial run itself."""
    if TRACE_FILE in env or config.tool == "none":
        return False
    return config.tool == "neuron" or on_neuron(backend, env)


def use_neuron_cache(config: CompileConfig, workspace: str, backend: str, env: MutableMapping[str, str]) -> str:
    """On Neuron: compile with the flags, and look into the cache, that the compile stage used.

    To be called before torch_xla is imported. A trial run keeps what its tool has set. The result tells of other flags
    that were set by hand, and now are not; '' when there were none.
    """
    if TRACE_FILE in env or not on_neuron(backend, env):
        return ""
    before, now = env.get("NEURON_CC_FLAGS", ""), config.flags.text()
    env["NEURON_CC_FLAGS"] = now
    env["NEURON_COMPILE_CACHE_URL"] = config.cache_root(workspace)
    return (
        f"NEURON_CC_FLAGS was {before!r}; the settings make it {now!r}"
        if before.split() not in ([], now.split())
        else ""
    )


def tool_command(script: str, *, parallel: int, workdir: Path) -> list[str]:
    """The tool on a wrapper script beside it. Options of the run command itself would be parsed by the tool."""
    return [PROGRAM, f"--num_parallel={parallel}", f"--parallel_compile_workdir={workdir}", f"./{script}"]


def wrapper_script(command: Sequence[str], *, cwd: Path, exit_file: Path) -> str:
    """A shell script that runs `command` and leaves its exit code, which the tool would hide, in a file."""
    return "\n".join(
        (
            "#!/bin/sh",
            f"cd {shlex.quote(str(cwd))} || exit 1",
            shlex.join(command),
            "code=$?",
            f'echo "$code" > {shlex.quote(str(exit_file))}',
            'exit "$code"',
            "",
        )
    )


def neuron_environment(
    env: Mapping[str, str], config: CompileConfig, *, cache_root: str, retry_failed: bool
) -> dict[str, str]:
    """The environment of the tool. Training must use the same NEURON_CC_FLAGS, which are part of the cache key.

    `retry_failed` adds the option to compile cached failures again; it is not part of the key.
    """
    flags = config.flags.text() + (" --retry_failed_compilation" if retry_failed else "")
    ours = {
        "NEURON_CC_FLAGS": flags,
        "NEURON_COMPILE_CACHE_URL": cache_root,
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES": str(config.max_retries),
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
    }
    return {name: value for name, value in env.items() if name not in NOT_INHERITED} | ours
