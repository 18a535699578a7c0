from pipeline.core.machines import MACHINES, NODES, Node, price_usd_per_hour


def test_jobs_are_planned_for_every_machine() -> None:
    assert MACHINES.keys() == NODES.keys()
    assert NODES["trn2.3xlarge"] == Node(vcpus=12, memory_mib=116_000, num_devices=1, num_efa=0)
    assert NODES["trn1n.32xlarge"] == Node(vcpus=128, memory_mib=490_000, num_devices=16, num_efa=16)


def test_what_the_settings_say_goes_first() -> None:
    assert price_usd_per_hour("trn1.2xlarge", None) == 1.34375
    assert price_usd_per_hour("trn1.2xlarge", 0.0) == 0.0
    assert price_usd_per_hour("abacus.large", None) is None
    assert price_usd_per_hour("trn2u.48xlarge", None) is None and price_usd_per_hour("trn2u.48xlarge", 9.0) == 9.0
    assert price_usd_per_hour("abacus.large", 3.0) == 3.0
