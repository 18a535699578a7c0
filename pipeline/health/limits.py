"""How long the health stage may take: its own limits, and what a job must give it."""

from pipeline.health.across_nodes import LIMIT_S as ACROSS_LIMIT_S
from pipeline.health.config import HealthConfig
from pipeline.health.instances import neuron_instance
from pipeline.health.tools import tool_checks, tools_limit_s

START_LIMIT_S = 60.0  # for the ranks to import what they need, on a busy host


def ranks_limit_s(config: HealthConfig, *, on_neuron: bool) -> float:
    """For all checks of the ranks of a node; the stage ends them then. 0 where no check of theirs is chosen."""
    if not config.wants("cores", "collectives"):
        return 0.0
    patience = config.patience(on_neuron=on_neuron)
    return START_LIMIT_S + patience * (5 * config.check_limit_s + 3 * config.collective_limit_s)


def stage_limit_s(config: HealthConfig, *, instance: str, on_neuron: bool, num_nodes: int, processes: int) -> float:
    """For the stage on a machine of that type, empty for any other: the tools with a limit of their own, the ranks,
    and the wait for the other nodes. The short checks of the host are not in it."""
    machine = neuron_instance(instance) if on_neuron else None
    tools = tool_checks(machine, config, num_nodes=num_nodes, processes=processes)
    nodes_s = config.nodes_wait_s if num_nodes > 1 else 0.0
    if config.nccom_across_nodes and config.wants("tools") and machine is not None and num_nodes > 1:
        nodes_s += ACROSS_LIMIT_S
    return tools_limit_s(tools, config) + ranks_limit_s(config, on_neuron=on_neuron) + nodes_s
