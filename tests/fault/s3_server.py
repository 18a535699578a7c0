"""The S3 server with workspaces on it, to act in the middle of an upload, which no delay can time."""

from itertools import count
from pathlib import Path

from tests.fault.harness import TINY, Place, prepared
from tests.kit.s3 import MotoServer, s3_env


class S3Server(MotoServer):
    """Hands out workspaces on S3."""

    def __init__(self) -> None:
        super().__init__("fault")
        self.env = s3_env(self.url)
        self._names = count()

    def place(
        self, folder: Path, backend: str = "cpu", *, flags: tuple[str, ...] = TINY, with_data: bool = True
    ) -> Place:
        """A workspace under a prefix of its own, with prepared data in it or empty. `env` must be set here too."""
        name = f"ws-{next(self._names)}"
        if with_data:
            base = prepared(flags)
            for path in (path for path in base.rglob("*") if path.is_file() and ".scratch" not in path.parts):
                key = f"{name}/{path.relative_to(base).as_posix()}"
                self.client.put_object(Bucket=self.bucket, Key=key, Body=path.read_bytes())
        return Place(f"s3://{self.bucket}/{name}", folder, (*flags, f"--backend={backend}"), self.env)
