"""Seeded faults of ranks under health checks: with this folder on PYTHONPATH, every Python process imports it.

SEEDED_FAULT is `<fault>@<rank>`, maybe several. SEEDED_DEVICES makes all ranks say that their cores are real devices,
no share of a host.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

if "TRN_HEALTH_DIR" in os.environ and "RANK" in os.environ:
    import torch
    from torch import Tensor

    from pipeline.backends.cpu import CpuBackend
    from pipeline.health import device, ranks

    vars(device)["BURN_WIDTH"] = 256  # a burn is told by its ratio to that of others
    sound_join = vars(ranks)["open_world_group"]
    # Whatever limit collectives have: on a busy machine ranks start seconds apart.
    vars(ranks)["open_world_group"] = lambda kind, limit_s: sound_join(kind, 60.0)

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
        vars(ranks)["check_burn"] = partial(device.check_burn, clock=lambda: pace * time.process_time())

    def replace_gather(**changes: object) -> None:
        faulty = [replace(ranks.ALL[0], **changes), *ranks.ALL[1:]]  # type: ignore[arg-type]
        vars(ranks)["check_collectives"] = partial(ranks.check_collectives, collectives=faulty)

    def stay_away() -> None:
        """Until the verdict of rank 0 is there."""
        sound, verdict = ranks.ALL[0].expected, Path(os.environ["TRN_HEALTH_DIR"]) / "rank-0.json"

        def expected(rank: int, num: int, turn: int, count: int) -> Tensor:
            while not verdict.exists():
                time.sleep(0.05)
            return sound(rank, num, turn, count)

        replace_gather(expected=expected)

    def spoil_gather(spoil: Callable[[Tensor, int], Tensor]) -> None:
        sound = ranks.ALL[0].run
        replace_gather(run=lambda backend, tensor, these: spoil(sound(backend, tensor, these), len(tensor)))

    def swap(found: Tensor, count: int) -> Tensor:
        return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]])

    if os.environ.get("SEEDED_DEVICES"):
        CpuBackend.shares_host_memory = False
        burn_by(1)
    seeds: dict[str, Callable[[], None]] = {
        "matmul": lambda: spoil_first_result(100.0),
        "nan": lambda: spoil_first_result(float("nan")),
        "slow": lambda: burn_by(100),
        "absent": stay_away,
        "swapped": lambda: spoil_gather(swap),
    }
    for fault, _, sick in (word.partition("@") for word in os.environ.get("SEEDED_FAULT", "").split()):
        if sick == os.environ["RANK"]:
            seeds[fault]()
