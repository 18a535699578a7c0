"""The checks of a rank on an NVIDIA GPU, where there is one: its operations, its memory, and NCCL with itself."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.backends import process_group
from pipeline.backends.cuda import CudaBackend
from pipeline.core.stop import StopSignal
from pipeline.health.check import Verdict
from pipeline.health.config import HealthConfig
from pipeline.health.ranks import (
    COLLECTIVES,
    SIZES_BYTES,
    RankChecks,
    Ranks,
    agent_store,
    check_collectives,
    report_rank,
)
from pipeline.parallel.world import World

pytestmark = [pytest.mark.stage, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.mark.parametrize("profile", ["quick", pytest.param("full", marks=pytest.mark.thorough)])
def test_a_sound_gpu_passes(tmp_path: Path, profile: str) -> None:
    config = HealthConfig.model_validate({"profile": profile, "burn_s": 0.5})
    report = report_rank(RankChecks("cuda", World(), config, os.environ, seed=1), tmp_path, StopSignal())
    assert [result.name for result in report.results] == ["device", "operations", "device memory", "burn"]
    assert report.verdict is Verdict.PASS, report.results


def test_collectives_go_through_nccl() -> None:
    backend = CudaBackend(0)
    store = agent_store("127.0.0.1", 0, is_agent=True)
    dist.init_process_group(f"cpu:gloo,{process_group(backend.name)}", store=store, rank=0, world_size=1)
    try:
        ranks = Ranks(0, range(1), store, backend.device, 30.0, StopSignal())
        result = check_collectives(ranks)
        assert result.verdict is Verdict.PASS, result
        assert len(result.figures) == len(COLLECTIVES) * len(SIZES_BYTES)
        mine = torch.arange(6.0, device=backend.device)
        assert torch.equal(backend.all_gather(mine), mine)
    finally:
        dist.destroy_process_group()
