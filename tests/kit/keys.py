"""Key pairs that sign models. Import it after `pytest.importorskip("cryptography")`."""

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from pipeline.core.stop import StopSignal
from pipeline.registry.signing import ModelKeys, open_keys
from pipeline.settings import Settings

P256, P384, P521 = ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()


def key_pair(folder: Path, name: str, curve: ec.EllipticCurve = P256, *, password: str = "") -> None:
    """Write `<name>.pem` and `<name>.pub`."""
    key = ec.generate_private_key(curve)
    secret = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    (folder / f"{name}.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)


def signing_settings(folder: Path, sign: str = "", *verify: str) -> Settings:
    """Settings with these keys, which are files in `folder` unless they are URIs."""

    def source(name: str, end: str) -> str:
        return name if "://" in name or not name else f"{folder}/{name}.{end}"

    registry: dict[str, Any] = {"sign_key": source(sign, "pem"), "verify_key": [source(name, "pub") for name in verify]}
    return Settings.model_validate({"registry": registry})


def keys_of(folder: Path, sign: str = "", *verify: str) -> ModelKeys:
    return open_keys(signing_settings(folder, sign, *verify), StopSignal(), to_sign=True)
