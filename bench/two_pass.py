"""Cost of the loss over a whole global batch under accumulation: `python -m bench.two_pass`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peer_speed import BATCH, Sides, command, measure, parser_of, ratios
from bench.results import Figure, Result, figure, finish

NAME = "two_pass"
TITLE = "Time of a step of 64 pairs in micro-batches, two forward passes, over that of the same step in one"
METHOD = """
One program in three processes that take blocks of steps in turn, as in bench.peer_speed: MiniLM-L6 in fp32, the
contrastive loss over the products of all 64 pairs, cut into one micro-batch of 64, 4 of 16 or 8 of 8. Cut, a step
embeds every micro-batch without a gradient, computes the loss of the whole batch, and embeds each again to carry its
gradient: the loss is the same number, the memory that of a micro-batch. A repeat is one pass over the pairs.
"""
MICROS = (64, 16, 8)


def figures_of(device: str, sides: Sides) -> list[Figure]:
    """Ratios of times first."""
    whole = sides[str(MICROS[0])]
    made = [
        figure(f"{device}_{BATCH // micro}x{micro}_ratio", ratios(whole.rates, sides[str(micro)].rates), "x", text)
        for micro in MICROS[1:]
        for text in (f"time of {BATCH // micro} micro-batches of {micro} / of one of {BATCH}, {device}",)
    ]
    for micro in MICROS:
        one, text = sides[str(micro)], f"{BATCH // micro} x {micro}, {device}"
        made.append(figure(f"{device}_{BATCH // micro}x{micro}", one.rates, "pairs/s", text))
        made.append(figure(f"{device}_{BATCH // micro}x{micro}_memory", one.peaks, "MiB", f"peak memory, {text}"))
    compiles = sum(one.compiles for one in sides.values())
    return [*made, figure(f"{device}_compiles", compiles, "graphs", "compiled during the measured blocks")]


def run(*, quick: bool, data: Path | None, model: Path | None, devices: Sequence[str]) -> list[Result]:
    """Every device: three cuts in turn. A result for each, so that one may be measured without the other."""

    def commands_of(device: str) -> Callable[[Path], dict[str, list[str]]]:
        return lambda folder: {
            str(micro): command("ours", folder, "--device", device, "--micro", str(micro)) for micro in MICROS
        }

    found, settings = measure({device: commands_of(device) for device in devices}, quick, data, model)
    return [
        finish(
            f"{NAME}_{device}", f"{TITLE}, {device}", METHOD, figures_of(device, sides), quick=quick, settings=settings
        )
        for device, sides in found.items()
    ]


if __name__ == "__main__":
    flags = parser_of(NAME, __doc__).parse_args()
    run(quick=flags.quick, data=flags.data, model=flags.model, devices=flags.device)
