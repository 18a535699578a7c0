"""Who a machine is: firmware, host name."""

from pipeline.health.host import Identity, read_identity

NITRO = {"sys_vendor": "Amazon EC2", "board_asset_tag": "i-0123456789abcdef0", "product_name": "trn1.32xlarge"}


def found(dmi: dict[str, str]) -> Identity:
    return read_identity(dmi=lambda name: dmi.get(name, ""), host_name=lambda: "box")


def test_the_firmware_of_nitro_machines_knows() -> None:
    assert found(NITRO) == Identity("i-0123456789abcdef0", "trn1.32xlarge")


def test_elsewhere_it_is_the_host_name() -> None:
    laptop = {"sys_vendor": "LENOVO", "board_asset_tag": "Not Available", "product_name": "20XW.x"}
    assert found(laptop) == found({}) == found({"sys_vendor": "Amazon EC2"}) == Identity("box")


def test_an_answer_that_is_no_instance_id_is_not_believed() -> None:
    assert found({**NITRO, "board_asset_tag": "none", "product_name": "a b"}) == Identity("box")
