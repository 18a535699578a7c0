"""The S3 server and the storages are those of tests/storages."""

from tests.kit.storages import aws, moto_address, s3_uri, stop, storage, storage_uri

__all__ = ["aws", "moto_address", "s3_uri", "stop", "storage", "storage_uri"]
