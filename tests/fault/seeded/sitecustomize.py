"""Seeded faults of ranks under health checks: with this folder on PYTHONPATH, every Python process imports it.

SEEDED_FAULT is `<fault>@<rank>`, maybe several. SEEDED_DEVICES makes all ranks say that their cores are real devices,
no share of a host.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if "TRN_HEALTH_DIR" in os.environ and "RANK" in os.environ:
    import torch
    from torch import Tensor

    from pipeline.backends.cpu import CpuBackend
    from pipeline.health import device

    vars(device)["BURN_WIDTH"] = 256  # a burn is told by its ratio to that of others
    sound_join = vars(device)["open_world_group"]
    # Whatever limit collectives have: on a busy machine ranks start seconds apart.
    vars(device)["open_world_group"] = lambda kind, limit_s: sound_join(kind, 60.0)

    def spoil_first_result(value: float) -> None:
        """That of the first operation, the product of fp32 matrices."""
        sound, calls = CpuBackend.to_host, iter(range(10**9))

        def to_host(self: CpuBackend, tensors: list[Tensor]) -> list[Tensor]:
            host = sound(self, tensors)
            if next(calls) == 0:
                host[0].reshape(-1)[3] += value
            return host

        CpuBackend.to_host = to_host  # type: ignore[assignment,method-assign]

    def burn_by(pace: int) -> None:
        """Time of the processor: another process that has it does not count. So many times as long for everything."""
        vars(device)["check_burn"] = partial(device.check_burn, clock=lambda: pace * time.process_time())

    def stay_away() -> None:
        """Until the verdict of rank 0 is there."""
        sound, verdict = device.expected_result, Path(os.environ["TRN_HEALTH_DIR"]) / "rank-0.json"

        def expected(*given: Any) -> Tensor:
            while not verdict.exists():
                time.sleep(0.05)
            return sound(*given)

        vars(device)["expected_result"] = expected

    def swap_gathered() -> None:
        sound = CpuBackend.all_gather

        def all_gather(self: CpuBackend, tensor: Tensor, *given: Any) -> Tensor:
            found, count = sound(self, tensor, *given), len(tensor)
            return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]])

        CpuBackend.all_gather = all_gather  # type: ignore[assignment,method-assign]

    if os.environ.get("SEEDED_DEVICES"):
        CpuBackend.shares_host_memory = False
        burn_by(1)
    seeds: dict[str, Callable[[], None]] = {
        "matmul": lambda: spoil_first_result(100.0),
        "nan": lambda: spoil_first_result(float("nan")),
        "slow": lambda: burn_by(100),
        "absent": stay_away,
        "swapped": swap_gathered,
    }
    for fault, _, sick in (word.partition("@") for word in os.environ.get("SEEDED_FAULT", "").split()):
        if sick == os.environ["RANK"]:
            seeds[fault]()
