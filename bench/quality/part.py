"""What one part of this bench found, and the small files that keep it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from bench.results import RESULTS

KEPT = RESULTS / "quality"
OURS, BM25, INCREMENTAL = "ours", "bm25", "incremental"
SPLIT_DIGITS = "mnrl_split_digits"
"""MNRL with texts cut as `data.tokenizer.split_digits` cuts them: what a change of tokenizer would give the peer."""
_DIGITS = 4
_USUAL_BATCH, _USUAL_PRECISION = 64, "autocast"
CPU = "cpu"
DEVICES = (CPU, "cuda")


class Budget(NamedTuple):
    """What trained sides must share to stand in one table."""

    pairs: int
    """Seen in training."""
    batch: int
    precision: str
    device: str = CPU

    @property
    def name(self) -> str:
        """For names of results: the pairs, and what is not usual."""
        batch = "" if self.batch == _USUAL_BATCH else f"_batch_{self.batch}"
        precision = "" if self.precision == _USUAL_PRECISION else f"_{self.precision}"
        return f"{self.pairs}{batch}{precision}{'' if self.device == CPU else f'_{self.device}'}"

    @property
    def seen(self) -> str:
        """For titles of results."""
        return f"{self.pairs:,} pairs seen{'' if self.device == CPU else f' on {self.device}'}"


class PartResult(BaseModel):
    """What one part found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    part: str
    variant: str = Field("", description="Name of `settings`; empty: the recipe as it is")
    split: str
    seed: int
    steps: int = Field(description="0: not trained")
    batch: int
    precision: str
    device: str = Field(CPU, description="That trained and scored: cpu or cuda")
    gpu: str = Field("", description="Its name, as the driver has it")
    rate: float = Field(description="Learning rate of a peer; 0: that of the recipe")
    settings: tuple[str, ...] = Field((), description="Flags of ours over the recipe")
    recipe: str = Field("", description="Fingerprint of the recipe of ours")
    reads: int = Field(1, ge=1, description="How often this part was run, each time reading its split")
    figures: dict[str, float]
    train_seconds: float
    code_version: str = ""
    ndcg_by_query: tuple[float, ...] = ()

    @property
    def budget(self) -> Budget:
        return Budget(self.steps * self.batch, self.batch, self.precision, self.device)

    @property
    def side(self) -> str:
        """What seeds of it share: a peer is one at each learning rate, ours one for each variant."""
        return "-".join([self.part, *filter(None, [self.variant])]) + (f"@{self.rate:g}" if self.rate else "")

    @property
    def name(self) -> str:
        """Of its file."""
        trained = [f"{self.steps}x{self.batch}", self.precision] if self.steps else []
        trained += [self.device] if self.device != CPU else []
        rate = [f"{self.rate:g}"] if self.rate else []
        return "-".join(
            [self.task, self.part, *filter(None, [self.variant]), self.split, *trained, *rate, f"s{self.seed}"]
        )


def keep(result: PartResult, folder: Path) -> PartResult:
    """Write a part, in place of an earlier run of it, which counts as a read of the split."""
    path = folder / f"{result.name}.json"
    if path.exists():
        result = result.model_copy(update={"reads": read_part(path).reads + result.reads})
    fields = result.model_dump(mode="json")
    fields["figures"] = {name: round(value, 6) for name, value in result.figures.items()}
    by_query = [round(value, _DIGITS) for value in fields.pop("ndcg_by_query")]
    # One line for all queries: a line each would be most of the repository.
    text = json.dumps(fields, indent=1).removesuffix("\n}")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text},\n "ndcg_by_query": {json.dumps(by_query, separators=(",", ":"))}\n}}\n', encoding="utf-8")
    return result


def read_part(path: Path) -> PartResult:
    """Raises SystemExit for a file that is none."""
    try:
        return PartResult.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path} is no part of this bench: {error}; delete it and run the part again") from error


def is_kept(result: PartResult, folder: Path = KEPT) -> bool:
    """This part was run, with the same recipe."""
    path = folder / f"{result.name}.json"
    return path.exists() and read_part(path).recipe == result.recipe


def read_parts(folder: Path) -> list[PartResult]:
    """All parts that are kept there, by name."""
    return [read_part(path) for path in sorted(folder.glob("*.json"))]


def provenance(parts: Sequence[PartResult]) -> dict[str, str | int | float]:
    """Return the revisions of the code that ran these parts, and the GPU if one was used."""
    codes, gpus = ({getattr(part, name) for part in parts} - {""} for name in ("code_version", "gpu"))
    return {"run_with": ", ".join(sorted(codes)), **({"gpu": ", ".join(sorted(gpus))} if gpus else {})}


def reads_of_test(parts: Sequence[PartResult], task: str) -> int:
    """How often the test split of a task was read, by any part."""
    return sum(part.reads for part in parts if part.task == task and part.split == "test")
