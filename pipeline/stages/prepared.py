"""What the prepare and mine stages left for the stages after them."""

from dataclasses import dataclass

from pipeline.context import StageContext, load_result
from pipeline.core.errors import DataError


@dataclass(frozen=True)
class Prepared:
    """Committed folders in the workspace."""

    token_sets: tuple[str, ...]
    """In partition order."""
    tokenizer: str


def find_prepared(ctx: StageContext) -> Prepared | None:
    """The prepared data of this cycle, None when there is none yet."""
    result = load_result(ctx.workspace, ctx.cycle, "prepare")
    if result is None:
        return None
    names = sorted(name for name in result.outputs if name.startswith("token_set_"))
    return Prepared(tuple(result.outputs[name] for name in names), result.outputs["tokenizer"])


def load_prepared(ctx: StageContext) -> Prepared:
    """The prepared data of this cycle. Raises DataError when there is none yet."""
    prepared = find_prepared(ctx)
    if prepared is None:
        raise DataError(
            f"cycle {ctx.cycle} has no prepared data",
            expected="the result of the prepare stage",
            next_command=f"trnpipe prepare --cycle {ctx.cycle}, with the same settings",
        )
    return prepared


def mined_negatives(ctx: StageContext) -> str | None:
    """Where the negatives lie that were mined in this cycle; None when it has not mined."""
    result = load_result(ctx.workspace, ctx.cycle, "mine")
    return None if result is None else result.outputs.get("negatives")
