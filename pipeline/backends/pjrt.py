"""Which device PyTorch/XLA will run on, told without opening it."""

from collections.abc import Mapping
from importlib.util import find_spec


def pjrt_device(env: Mapping[str, str]) -> str:
    """The kind of PJRT device: the one that is set, else NEURON where its plug-in is installed, else CPU."""
    return env.get("PJRT_DEVICE") or ("NEURON" if find_spec("libneuronxla") else "CPU")
