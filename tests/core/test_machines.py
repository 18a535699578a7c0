from pipeline.core.machines import MACHINES, NODES, Node


def test_jobs_are_planned_for_every_machine() -> None:
    assert MACHINES.keys() == NODES.keys()
    assert NODES["trn2.3xlarge"] == Node(vcpus=12, memory_mib=116_000, num_devices=1, num_efa=0)
    assert NODES["trn1n.32xlarge"] == Node(vcpus=128, memory_mib=490_000, num_devices=16, num_efa=16)
