"""Programs that stand for the Neuron tools, and the outputs they give."""

import os
from pathlib import Path
from typing import Any

GIB = 2**30


def fake_tool(folder: Path, name: str, script: str) -> None:
    """A shell script called `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def says(folder: Path, name: str, text: str, *, exit_code: int = 0) -> None:
    """A program that prints `text` and ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text)
    fake_tool(folder, name, f"cat {folder / name}.txt; exit {exit_code}")


def environment(folder: Path) -> dict[str, str]:
    """Only the fakes and the plain tools of a shell: no Neuron tool of this machine is run."""
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}


def neuron_ls(
    num_devices: int = 16, *, cores: int = 2, memory_gib: int = 32, lnc: int | None = None, new: bool = True
) -> list[dict[str, Any]]:
    """As `neuron-ls -j` lists them. New: SDK 2.25 and later."""
    devices: list[dict[str, Any]] = []
    for index in range(num_devices):
        device: dict[str, Any] = {"neuron_device": index, "bdf": f"{16 + index:02x}:1e.0"}
        if new:
            device |= {"cpu_affinity": "0-31,64-95", "numa_node": "-1" if num_devices == 1 else "0"}
        device |= {
            "connected_to": None if num_devices == 1 else [(index - 1) % num_devices, (index + 1) % num_devices],
            "nc_count": cores,
        }
        if lnc is not None:
            device["logical_neuroncore_config"] = lnc
        device["memory_size"] = memory_gib * GIB
        if new:
            device["neuroncore_ids"] = list(range(index * cores, (index + 1) * cores))
        device["neuron_processes"] = []
        devices.append(device)
    return devices


NCCOM_TABLE_OLD = """\
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
     1048576          262144     fp32          95          10.28          19.92
     8388608         2097152     fp32         300          26.04          50.46
    67108864        16777216     fp32        1893          33.01          63.97
Avg bus bandwidth:      44.7833GB/s
"""
NCCOM_TABLE_NEW = """\
2026-05-02 03:11:08.112 INFO using seed 1777689068
     size(B)    count(elems)  algorithm    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)  total_input_size(B)
     1048576          262144       mesh    fp32           95.04          10.28          19.92              1048576
     8388608         2097152       mesh    fp32          300.12          26.04          50.46              8388608
    67108864        16777216       ring    fp32         1893.31          33.01          63.97             67108864
Avg bus bandwidth:      44.7833GB/s
"""
NCCOM_FAILED = """\
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
     1048576    Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log
1 errors found - test failed
"""
NCCOM_NO_DRIVER = "Neuron DKMS Driver is not running! Read the troubleshooting guide at: https://awsdocs.example/\n"


def nccom_table(*busbw: float) -> str:
    """With these bandwidths in place of those of the newer table."""
    text = NCCOM_TABLE_NEW
    for old, new in zip(("19.92", "50.46", "63.97"), busbw, strict=True):
        text = text.replace(old, f"{new:.2f}")
    return text
