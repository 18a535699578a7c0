"""Fixtures of the data tests: small inputs and a prepare() with little to say."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.prepare import PreparedData, prepare
from pipeline.io.storage import Storage, open_storage
from pipeline.telemetry.events import EventName
from tests.kit.real_data import real_file


@pytest.fixture
def pricerunner() -> str:
    return str(real_file("pricerunner_relevance_derived.parquet"))


@dataclass
class Workplace:
    """A workspace with its scratch; `events` collects what prepare said."""

    folder: Path
    events: list[tuple[EventName, dict[str, Any]]] = field(default_factory=list)
    stop: StopSignal = field(default_factory=StopSignal)

    @property
    def storage(self) -> Storage:
        return open_storage(str(self.folder / "workspace"), stop=self.stop)

    def emit(self, name: EventName, /, **fields: object) -> None:
        self.events.append((name, fields))

    def names(self) -> list[EventName]:
        return [name for name, _ in self.events]

    def prepare(self, config: DataConfig, tokenizer: bytes | None = None, worker: int = 0, **more: Any) -> PreparedData:
        self.events.clear()
        return prepare(
            config,
            self.storage,
            scratch=self.folder / "scratch",
            tokenizer=tokenizer,
            worker=worker,
            events=self.emit,
            stop=self.stop,
            **more,
        )

    def bytes_of(self, prefix: str) -> dict[str, bytes]:
        folder = self.folder / "workspace" / prefix
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def workplace(tmp_path: Path) -> Callable[[str], Workplace]:
    """Fresh workspaces by name."""

    def make(name: str = "one") -> Workplace:
        (tmp_path / name).mkdir()
        return Workplace(tmp_path / name)

    return make
