"""A stand-in for the training program: `--graphs N`, and any other option, which it records.

It shows its graphs as torch_neuronx does, under graph extraction or compiling on the spot.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.compile.fake_neuron import cache as fake


def main() -> int:
    """Trace N graphs and end."""
    words = sys.argv[1:]
    num_graphs = int(words[words.index("--graphs") + 1])
    name, number = fake.fault()
    env = {key: value for key, value in os.environ.items() if key.startswith("NEURON_")}
    fake.state("trial.json").write_text(json.dumps({"argv": words, "env": env, "cwd": str(Path.cwd())}))
    print("step 1 | loss nan", flush=True)
    if name == "silent":
        return 0
    if "--own-session" in words:  # as torchrun is started for the ranks
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cache = fake.Cache()
    for index in range(num_graphs):
        if index == 1 and name == "trial":
            print("Traceback: the trial run breaks here", file=sys.stderr)
            return number
        if index == 1 and name == "hang-trial":
            fake.state("hangs").touch()
            time.sleep(600)
        fake.neuron_cc(cache, fake.graph_hash(index), f"HLO {index}".encode())
    print("done", flush=True)
    return 0
