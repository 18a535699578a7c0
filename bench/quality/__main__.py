"""Quality beside the simplest tools that do the same job: `python -m bench.quality PART --task TASK --data FOLDER`.

Every trained side starts from the same MiniLM weights (`--model FOLDER`), sees the same number of pairs in the same
precision, and is scored by the same search and metric code. A part keeps its result as a small file in
bench/results/quality (`--keep`), so the bench may be run in parts, over days. `table` makes the results of what is
there. `incremental` runs daily cycles beside one training on all, and goes on where it ended. Choices are made
with `--split valid`; each run with `--split test` is counted, and the table tells how many.
"""

import argparse
import sys
from pathlib import Path

from bench.quality.incremental import DAYS, TOGETHER, Arm, Chain
from bench.quality.part import CPU, DEVICES, INCREMENTAL, KEPT, OURS, PartResult, is_kept, keep
from bench.quality.run import PARTS, Run, run_part
from bench.quality.table import write
from bench.quality.tasks import TASKS


def main() -> None:
    words, more = _split(sys.argv[1:])
    arguments = _parser().parse_args(words)
    if more and (arguments.part != OURS or not arguments.variant):
        raise SystemExit("settings after -- are those of `ours`, and need a name: --variant NAME")
    if arguments.part == "table":
        write(arguments.keep)
    elif arguments.part == INCREMENTAL:
        run_incremental(arguments)
    else:
        run = run_of(arguments, arguments.part, arguments.variant, more)
        show(keep(run_part(run), arguments.keep))


def run_incremental(arguments: argparse.Namespace) -> None:
    """Every arm that is not kept yet; one that was ended goes on."""
    arms = [Arm(share, arguments.days) for share in arguments.replay]
    arms = [TOGETHER, *arms] if arguments.days == DAYS else arms
    names = ("task", "data", "model", "split", "steps", "batch", "precision", "device", "seed")
    for arm in arms:
        chain = Chain(arm=arm, **{name: getattr(arguments, name) for name in names})
        if is_kept(chain.result, arguments.keep):
            print(f"{chain.result.name}: kept already", flush=True)
        else:
            show(keep(chain.run(), arguments.keep))
            chain.forget()


def _split(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """What is said to this bench, and after -- to ours."""
    place = words.index("--") if "--" in words else len(words)
    return words[:place], tuple(words[place + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality", description=__doc__, epilog="After --: further settings of ours."
    )
    parser.add_argument("part", choices=[*PARTS, INCREMENTAL, "table"])
    parser.add_argument("--task", choices=sorted(TASKS), default="pricerunner")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--model", type=Path, help="folder of the MiniLM weights and tokenizer")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate of a peer; ours has that of its recipe")
    parser.add_argument("--precision", choices=("fp32", "autocast"), default="autocast")
    parser.add_argument("--device", choices=DEVICES, default=CPU, help="that trains and scores")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", default="", help="name of the settings after --; it is no row of the table")
    parser.add_argument("--replay", type=float, nargs="+", default=[0.1], help="shares of older days, an arm each")
    parser.add_argument("--days", type=int, default=DAYS, help="number of days that the rows are dealt to")
    parser.add_argument("--workspace", type=Path, help="of ours; kept, so that what a teacher computed is reused")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder of the parts' results")
    return parser


def run_of(arguments: argparse.Namespace, part: str, variant: str = "", settings: tuple[str, ...] = ()) -> Run:
    """A part as the command line asks for it."""
    if arguments.data is None:
        raise SystemExit("which data? --data FOLDER, with the files of bench/quality/tasks.py")
    names = ("task", "data", "model", "split", "steps", "batch", "rate", "precision", "device", "seed")
    workspace = arguments.workspace and arguments.workspace.resolve()
    told = {name: getattr(arguments, name) for name in names}
    return Run(part=part, variant=variant, settings=settings, workspace=workspace, **told)


def show(result: PartResult) -> None:
    shown = "  ".join(f"{name} {value:.4f}" for name, value in result.figures.items())
    print(f"{result.name}: {shown}  ({result.train_seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
