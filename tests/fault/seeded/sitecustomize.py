"""Seeded faults of ranks under health checks: with this folder on PYTHONPATH, every Python process imports it.

SEEDED_FAULT is `<fault>@<rank>`, maybe several. SEEDED_DEVICES makes all ranks say that their cores are real devices,
no share of a host.
"""

import os
import time
from collections.abc import Callable
from functools import partial

if "TRN_HEALTH_DIR" in os.environ and "RANK" in os.environ:
    import torch
    from torch import Tensor

    from pipeline.backends.cpu import CpuBackend
    from pipeline.health import device, ranks

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

    def slow_down() -> None:
        """Its clock finds ten times as long for everything."""
        vars(ranks)["check_burn"] = partial(device.check_burn, clock=lambda: 10 * time.monotonic())

    def stay_away() -> None:
        sound = ranks.Ranks.arrive

        def arrive(self: ranks.Ranks, place: str, limit_s: float | None = None) -> list[int]:
            if place == "all-gather/8/0":
                self.stop.wait(600)
            return sound(self, place, limit_s)

        ranks.Ranks.arrive = arrive  # type: ignore[method-assign]

    def spoil_gather(spoil: Callable[[Tensor, int], Tensor]) -> None:
        sound = ranks.all_gather

        def faulty(these: ranks.Ranks, count: int, turn: int) -> ranks.Prepared:
            run, expected = sound(these, count, turn)
            return lambda: spoil(run(), count), expected

        ranks.COLLECTIVES["all-gather"] = faulty

    def swap(found: Tensor, count: int) -> Tensor:
        return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]])

    if os.environ.get("SEEDED_DEVICES"):
        CpuBackend.shares_host_memory = False
    seeds: dict[str, Callable[[], None]] = {
        "matmul": lambda: spoil_first_result(100.0),
        "nan": lambda: spoil_first_result(float("nan")),
        "coarse": round_off,
        "slow": slow_down,
        "absent": stay_away,
        "dies": lambda: spoil_gather(lambda found, count: os._exit(1)),
        "swapped": lambda: spoil_gather(swap),
    }
    for fault, _, sick in (word.partition("@") for word in os.environ.get("SEEDED_FAULT", "").split()):
        if sick == os.environ["RANK"]:
            seeds[fault]()
