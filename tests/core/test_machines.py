from pipeline.core.machines import MACHINES, NODES, Node, price_usd_per_hour


def test_jobs_are_planned_for_every_machine() -> None:
    assert MACHINES.keys() == NODES.keys()
    assert NODES["trn2.3xlarge"] == Node(vcpus=12, memory_mib=116_000, num_devices=1, num_efa=0)
    assert NODES["trn1n.32xlarge"] == Node(vcpus=128, memory_mib=490_000, num_devices=16, num_efa=16)


def test_a_job_leaves_memory_to_the_machine_and_ranks_fill_it() -> None:
    for name, node in NODES.items():
        machine = MACHINES[name]
        assert 0.8 * machine.memory_gib * 1024 < node.memory_mib < machine.memory_gib * 1024
        assert machine.rank_counts[-1] == machine.num_cores


def test_what_the_settings_say_goes_first() -> None:
    assert price_usd_per_hour("trn1.2xlarge", None) == 1.34375
    assert price_usd_per_hour("trn1.2xlarge", 0.0) == 0.0
    assert price_usd_per_hour("abacus.large", None) is None
    assert price_usd_per_hour("trn2u.48xlarge", None) is None and price_usd_per_hour("trn2u.48xlarge", 9.0) == 9.0
    assert price_usd_per_hour("abacus.large", 3.0) == 3.0
