"""Makes the stand-in for torch-neuronx (tests/native/torch_neuronx) ready, and runs processes that have it.

It registers a device for good, so only child processes ever import it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from pipeline.backends.base import NATIVE_SINCE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = HERE / "torch_neuronx" / "device.cpp"
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None,
    reason="the stand-in device is C++: c++ and ninja are needed",
)

_BUILD = """
import sys
from torch.utils.cpp_extension import load
load("standin_device", [sys.argv[1]], build_directory=sys.argv[2], extra_cflags=["-O1"])
"""

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# The native package begins with torch 2.13. Under an older torch the stand-in has begun earlier.
_EARLIER = (
    "import pipeline.backends.base\n\npipeline.backends.NATIVE_SINCE = pipeline.backends.base.NATIVE_SINCE = {since}\n"
)


@cache
def device_library() -> Path:
    """The compiled device, for this torch and this source; made once on this machine (ten seconds), whoever asks."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"trnpipe-standin-{os.getuid()}" / key
    library = folder / "standin_device.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One process builds, the others wait. Unlike the loader's own lock, this one ends with a process that is killed.
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(folder, library)
    return library


def _build(folder: Path, library: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(dir=folder) as place:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(SOURCE), place],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (Path(place) / library.name).replace(library)


def matching_version() -> str:
    """Of torch-neuronx for the torch that is installed: its first two numbers are those of torch."""
    return ".".join([*torch.__version__.split(".")[:2], "3", "0"])


def with_package(folder: Path, version: str | None) -> dict[str, str]:
    """For a process that finds torch-neuronx `version` installed, by its metadata in `folder`; None: it does not."""
    site = folder / f"package-{version}"
    site.mkdir(parents=True, exist_ok=True)
    if version is not None:
        info = site / f"torch_neuronx-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    if version == matching_version() and _TORCH < NATIVE_SINCE:
        (site / "sitecustomize.py").write_text(_EARLIER.format(since=_TORCH))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (site, HERE, ROOT))),
        "TRNPIPE_BACKEND": "neuron",
        "OMP_NUM_THREADS": "1",
    }


def environment(folder: Path) -> dict[str, str]:
    """For a process that has the stand-in, with all operators."""
    return with_package(folder, matching_version()) | {
        "STANDIN_DEVICE": str(device_library()),
        "STANDIN_MISSING": "",
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "neff"),
    }


def run(command: list[str], env: dict[str, str], *, code: int = 0, timeout_s: float = 400) -> str:
    """What a process wrote, which has to end with `code`."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"exit {done.returncode}, expected {code}: {text[-8000:]}"
    return text
