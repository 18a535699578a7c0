"""How long the health stage may take, which its job must allow."""

import pytest

from pipeline.health.config import HealthConfig
from pipeline.health.tools import ranks_limit_s, stage_limit_s

QUICK = HealthConfig()
HOST_ONLY = HealthConfig.model_validate({"only": ["host"]})


@pytest.mark.parametrize(
    ("config", "on_neuron", "seconds"),
    [
        (HealthConfig(), False, 450.0),
        (HealthConfig(), True, 3960.0),
        (HealthConfig(profile="full"), False, 3960.0),
        (HOST_ONLY, True, 0.0),
    ],
)
def test_the_limit_of_all_ranks(config: HealthConfig, on_neuron: bool, seconds: float) -> None:
    assert ranks_limit_s(config, on_neuron=on_neuron) == seconds


def test_the_stage_may_take_what_its_parts_may() -> None:
    def limit_s(config: HealthConfig = QUICK, instance: str = "trn1.32xlarge", nodes: int = 1) -> float:
        on_neuron = instance != ""
        return stage_limit_s(config, instance=instance, on_neuron=on_neuron, num_nodes=nodes, processes=32)

    assert limit_s(instance="") == 450
    assert limit_s(HOST_ONLY) == 0
    assert limit_s(nodes=4) == limit_s() + QUICK.nodes_wait_s
    assert limit_s(HealthConfig(profile="full")) > limit_s() > 3960  # nccom-test has a limit of its own
    assert limit_s(HealthConfig.model_validate({"only": ["cores"]})) == 3960
