"""Elliptic-curve keys that sign models, in PEM files or in AWS KMS. No other module imports cryptography."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)

from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.kms import SCHEME, KmsKey
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import KeyNotFound, open_parent

PASSWORD = "SIGN_KEY_PASSWORD"  # noqa: S105 - the name of a variable
"""Environment variable with the password of an encrypted private key."""
_HASHES: dict[str, HashAlgorithm] = {"secp256r1": SHA256(), "secp384r1": SHA384(), "secp521r1": SHA512()}
"""Hash algorithms by curve, as in the Sigstore bundle format."""


@dataclass(frozen=True)
class PublicKey:
    """A public key. `source` is the setting that names it."""

    source: str
    key: ec.EllipticCurvePublicKey

    @property
    def hint(self) -> str:
        """The id of the key in a signature, which is the SHA-256 of its PEM text."""
        pem = self.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(pem).hexdigest()

    @property
    def hash(self) -> HashAlgorithm:
        return _HASHES[self.key.curve.name]

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        try:
            self.key.verify(signature, message, ec.ECDSA(self.hash))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class SigningKey:
    """A key that signs a message, and its public key."""

    public: PublicKey
    sign: Callable[[bytes], bytes]


def open_public_key(source: str, *, retry: RetryPolicy, stop: StopSignal) -> PublicKey:
    """Open a public key. Raises ConfigError if it does not exist or is not supported."""
    if source.startswith(SCHEME):
        data = KmsKey(source, retry=retry, stop=stop).public_key()
        return _public_key(source, lambda: load_der_public_key(data))
    pem = _read(source, retry, stop)
    return _public_key(source, lambda: load_pem_public_key(pem))


def open_signing_key(source: str, *, retry: RetryPolicy, stop: StopSignal) -> SigningKey:
    """Open a private key, which stays in AWS KMS if it is there. Raises ConfigError if it cannot be used."""
    if source.startswith(SCHEME):
        kms = KmsKey(source, retry=retry, stop=stop)
        data = kms.public_key()
        public = _public_key(source, lambda: load_der_public_key(data))
        name, size = public.hash.name, public.hash.digest_size
        return SigningKey(public, lambda text: kms.sign(hashlib.new(name, text).digest(), f"ECDSA_SHA_{8 * size}"))
    pem, password = _read(source, retry, stop), os.environ.get(PASSWORD)
    try:
        private = load_pem_private_key(pem, password.encode() if password else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # the cause is dropped, to never print a part of the key
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{source} is not a private key that can be read (registry.sign_key)",
            expected=f"an elliptic-curve key in PEM format, and {PASSWORD} only if it is encrypted",
            next_command="openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out sign.pem",
        )
    signed_with = private  # the type of `private` is lost in the function below
    public = _public_key(source, signed_with.public_key)
    return SigningKey(public, lambda text: signed_with.sign(text, ec.ECDSA(public.hash)))


def _public_key(source: str, load: Callable[[], object]) -> PublicKey:
    try:
        key = load()
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise ConfigError(
            f"{source} is not a public key that can be used",
            expected="an elliptic-curve key (P-256, P-384 or P-521), in PEM format if it is a file",
            next_command="openssl pkey -in sign.pem -pubout -out verify.pem",
        )
    return PublicKey(source, key)


def _read(source: str, retry: RetryPolicy, stop: StopSignal) -> bytes:
    storage, name = open_parent(source, retry=retry, stop=stop)
    try:
        return storage.read_bytes(name)
    except KeyNotFound:
        raise ConfigError(
            f"{storage.uri(name)} does not exist",
            expected="the key file that registry.sign_key or registry.verify_key names",
            next_command="restore it, or set the key that replaces it",
        ) from None
