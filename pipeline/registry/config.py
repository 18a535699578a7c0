"""Settings of the model registry."""

from pydantic import Field

from pipeline.core.record import Record


class RegistryConfig(Record):
    """The keys to sign promoted checkpoints with, and to verify them."""

    sign_key: str = Field(
        "",
        description="Private key that signs a checkpoint when it is promoted: a PEM file (path or URI), or"
        " awskms:///ARN (requires the package cryptography); empty to sign nothing",
    )
    verify_key: tuple[str, ...] = Field(
        (),
        description="Public keys, one of which must have signed a model before it is promoted, embedded, served,"
        " exported or imported: PEM files (paths or URIs), or awskms:///ARN; empty to verify nothing",
    )
