"""The fake `neuronx-cc`: `compile`, `list-operators`, `--version`, and the ways in which a compile ends badly."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from tests.compile.fake_neuron import cache as fake


def main() -> int:
    """0, 70 with a reason on standard error, or killed."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"NeuronX Compiler version {fake.VERSION}")
        return 0
    if words[:1] == ["list-operators"]:
        print("\n".join(("add", "dot", "multiply", "reduce")))
        return 0
    parser = argparse.ArgumentParser(prog="neuronx-cc")
    parser.add_argument("subcommand", choices=("compile",))
    parser.add_argument("hlo", type=Path)
    parser.add_argument("--framework", choices=("XLA",), required=True)
    parser.add_argument("--target", choices=("inf2", "trn1", "trn1n", "trn2"), required=True)
    parser.add_argument("--output", type=Path, default=Path("file.neff"))
    parser.add_argument("--verbose", default="warning")
    parser.add_argument("--model-type", choices=("generic", "transformer", "unet-inference"), default="generic")
    parser.add_argument("--auto-cast", choices=("none", "matmult", "all"), default="none")
    parser.add_argument("--auto-cast-type", choices=("bf16", "fp16", "tf32", "fp8_e4m3"), default="bf16")
    parser.add_argument("--optlevel", "-O", choices=("1", "2", "3"), default="2")
    options = parser.parse_args(words)
    with fake.state("compiles").open("a") as record:
        record.write(f"{options.hlo.parent.name}\n")
    misbehave(options.hlo.parent.name)
    options.output.write_bytes(b"NEFF" + options.hlo.read_bytes())
    print("...\nCompiler status PASS", flush=True)
    return 0


def misbehave(module: str) -> None:
    name, number = fake.fault()
    parallel = int(os.environ.get("FAKE_NEURON_NUM_PARALLEL", "1"))
    if name == "oom" and parallel > number:
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "oom-child" and parallel > number:
        print(
            "2026-04-13T01:46:31Z [F137] neuronx-cc was forcibly killed - This most commonly occurs due to "
            "insufficient system memory. Using a smaller data type, dimensions, batch size, or a larger instance "
            "type may help.",
            file=sys.stderr,
        )
        sys.exit(70)
    if name == "flaky" and fake.first_time("flaky"):
        print("ERROR: Internal Compiler Error", file=sys.stderr)
        sys.exit(70)
    if name == "fail" and f"MODULE_{fake.graph_hash(number)}+" in module:
        print("[NCC_EVRF007] Operator sort is not supported", file=sys.stderr)
        sys.exit(70)
    if name == "hang-compile":
        fake.state("hangs").touch()
        time.sleep(600)
