"""Device memory in use on one NeuronCore, from the driver's counters in sysfs.

Facts: AWS Neuron documentation, "Neuron Sysfs User Guide" (driver 2.28): in `memory_usage` the counter `total` is the
current use. Later drivers moved some nodes; what is not found is unknown.
"""

from collections.abc import Mapping
from pathlib import Path

SYSFS = Path("/sys/devices/virtual/neuron_device")
_ARCHITECTURE = "v2"  # of trn1, where the runtime numbers cores as the driver does; later chips join cores into one


def core_memory_bytes(env: Mapping[str, str], root: Path = SYSFS) -> int | None:
    """Bytes in use on the core of this process (NEURON_RT_VISIBLE_CORES); None where that cannot be told."""
    try:
        cores_of_device = int((root / "neuron0" / "core_count").read_text())
        device, core = divmod(int(env["NEURON_RT_VISIBLE_CORES"]), cores_of_device)
        folder = root / f"neuron{device}" / f"neuron_core{core}"
        if not (folder / "info/architecture/arch_type").read_text().strip().lower().endswith(_ARCHITECTURE):
            return None
        parts = [int(path.read_text()) for path in (folder / "stats/memory_usage/device_mem").glob("*/total")]
    except (KeyError, OSError, ValueError, ZeroDivisionError):
        return None
    return sum(parts) if parts else None
