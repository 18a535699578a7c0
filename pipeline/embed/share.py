"""Which part of the work is ours: one of several jobs, one of several ranks in it."""

from collections.abc import Mapping
from typing import Protocol

from pipeline.core.errors import ConfigError
from pipeline.parallel.world import World

ARRAY_INDEX = "AWS_BATCH_JOB_ARRAY_INDEX"


class Workers(Protocol):
    """Settings of a stage that an array of jobs shares."""

    @property
    def workers(self) -> int: ...
    @property
    def worker(self) -> int | None: ...


def worker_of(config: Workers, world: World, env: Mapping[str, str], stage: str = "embed") -> tuple[int, int]:
    """(worker, workers), ranks counted. Raises ConfigError when index and number do not fit together."""
    job = job_index(config, env, stage)
    return job * world.world_size + world.rank, config.workers * world.world_size


def job_index(config: Workers, env: Mapping[str, str], stage: str) -> int:
    """Which of `workers` jobs this is: as set, else as AWS Batch says. Raises ConfigError."""
    if config.worker is not None:
        source, index = f"{stage}.worker", config.worker
    elif given := env.get(ARRAY_INDEX):
        if not given.isdecimal():
            raise ConfigError(f"{ARRAY_INDEX} is {given!r}", expected="a number, as AWS Batch sets it")
        source, index = ARRAY_INDEX, int(given)
        if config.workers == 1:
            raise ConfigError(
                f"{ARRAY_INDEX} is {given}, but {stage}.workers is 1: every job of the array would do all the work",
                expected="the size of the array",
                next_command=f"--{stage}.workers SIZE, in the command of the array job",
            )
    elif config.workers > 1:
        raise ConfigError(
            f"{stage}.workers is {config.workers}, and nothing says which of them this is",
            expected=f"an array job of that size, which sets {ARRAY_INDEX}",
            next_command=f"--{stage}.worker INDEX, from 0",
        )
    else:
        return 0
    if index >= config.workers:
        raise ConfigError(
            f"{source} is {index} of {config.workers} workers",
            expected=f"0 to {config.workers - 1}",
            next_command=f"--{stage}.workers SIZE, the size of the array",
        )
    return index
