"""Optional TensorBoard sink; nothing is imported until it is asked for."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import ConfigError


class TensorBoardSink:
    """Scalars into a local folder that `tensorboard --logdir` reads. ConfigError when the extra is missing."""

    def __init__(self, log_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoard output is on, but the package tensorboard cannot be imported",
                expected="the extra 'tensorboard'",
                next_command="pip install 'trnpipe[tensorboard]', or turn the setting off",
            ) from error
        self._writer = SummaryWriter(str(log_dir))  # type: ignore[no-untyped-call]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point per name at `step`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]
