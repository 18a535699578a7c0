"""Seeded faults of ranks under health checks: with this folder on PYTHONPATH, every Python process imports it.

SEEDED_FAULT is `<fault>@<rank>`, maybe several. SEEDED_DEVICES makes all ranks say that their cores are real devices,
no share of a host.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

if "TRN_HEALTH_DIR" in os.environ and "RANK" in os.environ:
    import torch
    from torch import Tensor

    from pipeline.backends.cpu import CpuBackend
    from pipeline.health import device, ranks

    vars(device)["BURN_WIDTH"] = 256  # a burn is told by its ratio to that of others
    sound_join = ranks.join
    # Whatever limit collectives have: on a busy machine ranks start seconds apart.
    vars(ranks)["join"] = lambda these, kind, limit_s: sound_join(these, kind, 60.0)

    def spoil_first_result(value: float) -> None:
        """That of the first operation, the product of fp32 matrices."""
        sound, calls = CpuBackend.to_host, iter(range(10**9))

        def to_host(self: CpuBackend, tensors: list[Tensor]) -> list[Tensor]:
            host = sound(self, tensors)
            if next(calls) == 0:
                host[0].reshape(-1)[3] += value
            return host

        CpuBackend.to_host = to_host  # type: ignore[assignment,method-assign]

    def round_off() -> None:
        """As cores whose fp32 has the mantissa of bf16: all the same figures, beyond the tolerances of fp32."""
        sound = CpuBackend.to_host

        def to_host(self: CpuBackend, tensors: list[Tensor]) -> list[Tensor]:
            return [one.bfloat16().to(one.dtype) if one.is_floating_point() else one for one in sound(self, tensors)]

        CpuBackend.to_host = to_host  # type: ignore[assignment,method-assign]

    def burn_by(pace: int) -> None:
        """Time of the processor: another process that has it does not count. So many times as long for everything."""
        vars(ranks)["check_burn"] = partial(device.check_burn, clock=lambda: pace * time.process_time())

    def stay_away() -> None:
        """Until the verdict of rank 0 is there."""
        sound, verdict = ranks.Ranks.arrive, Path(os.environ["TRN_HEALTH_DIR"]) / "rank-0.json"

        def arrive(self: ranks.Ranks, place: str, limit_s: float | None = None) -> list[int]:
            if place == "all-gather/8/0":
                while not verdict.exists():
                    if self.stop.wait(0.05):
                        return sound(self, place, limit_s)
                return [0]
            return sound(self, place, limit_s)

        ranks.Ranks.arrive = arrive  # type: ignore[method-assign]

    def spoil_gather(spoil: Callable[[Tensor, int], Tensor]) -> None:
        sound = ranks.all_gather

        def faulty(these: ranks.Ranks, mine: Tensor) -> Callable[[], Tensor]:
            run = sound(these, mine)
            return lambda: spoil(run(), len(mine))

        ranks.COLLECTIVES["all-gather"] = faulty

    def swap(found: Tensor, count: int) -> Tensor:
        return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]])

    if os.environ.get("SEEDED_DEVICES"):
        CpuBackend.shares_host_memory = False
        burn_by(1)
    seeds: dict[str, Callable[[], None]] = {
        "matmul": lambda: spoil_first_result(100.0),
        "nan": lambda: spoil_first_result(float("nan")),
        "coarse": round_off,
        "slow": lambda: burn_by(100),
        "absent": stay_away,
        "dies": lambda: spoil_gather(lambda found, count: os._exit(1)),
        "swapped": lambda: spoil_gather(swap),
    }
    for fault, _, sick in (word.partition("@") for word in os.environ.get("SEEDED_FAULT", "").split()):
        if sick == os.environ["RANK"]:
            seeds[fault]()
