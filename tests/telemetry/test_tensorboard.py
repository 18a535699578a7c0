"""The optional sink."""

import sys
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.telemetry.tensorboard import TensorBoardSink


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.scalars(3, {"loss": 0.5, "lr": 0.1})
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]
    assert set(events.Tags()["scalars"]) == {"loss", "lr"}


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"trnpipe\[tensorboard\]"):
        TensorBoardSink(tmp_path)
