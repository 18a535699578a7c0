"""Sign with an asymmetric key in AWS KMS, which never leaves it."""

from collections.abc import Callable
from typing import Any

from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy, call_with_retry
from pipeline.io.s3_client import S3_ERRORS, error_code, is_retryable, new_client

SCHEME = "awskms:///"
"""Prefix of a key URI, as in cosign and other tools of Sigstore. An ARN, an alias or the id of a key follows."""


class KmsKey:
    """A key of AWS KMS with the usage SIGN_VERIFY, given by its URI. Raises the errors of `new_client`."""

    def __init__(self, uri: str, *, retry: RetryPolicy, stop: StopSignal) -> None:
        self.uri, self.key_id, self.retry, self.stop = uri, uri.removeprefix(SCHEME), retry, stop
        region = self.key_id.split(":")[3] if self.key_id.count(":") >= 5 else None  # an ARN may be of another region
        self._client = new_client("kms", region_name=region)

    def public_key(self) -> bytes:
        """Return the public key in DER format. Raises ConfigError if the key cannot be used, and TransientError."""
        answer = self._call("reading the public key of", lambda: self._client.get_public_key(KeyId=self.key_id))
        return bytes(answer["PublicKey"])

    def sign(self, digest: bytes, algorithm: str) -> bytes:
        """Sign a digest and return the signature in DER format. Raises the errors of `public_key`."""
        request = {"KeyId": self.key_id, "Message": digest, "MessageType": "DIGEST", "SigningAlgorithm": algorithm}
        return bytes(self._call("signing with", lambda: self._client.sign(**request))["Signature"])

    def _call(self, doing: str, request: Callable[[], Any]) -> Any:
        doing = f"{doing} {self.uri}"
        try:
            return call_with_retry(request, self.retry, retryable=is_retryable, stop=self.stop, doing=doing)
        except S3_ERRORS as error:
            name = error_code(error) or type(error).__name__
            if is_retryable(error):
                raise TransientError(
                    f"error while {doing}: {name} (gave up at the retry deadline)",
                    expected="a successful response from AWS KMS within storage.total_deadline_s",
                    next_command="run the same command again; if it still fails, check the network",
                ) from error
            raise ConfigError(
                f"AWS KMS refused {doing}: {name}",
                expected="an enabled key with the usage SIGN_VERIFY, and a role that may use kms:GetPublicKey (and"
                " kms:Sign to promote)",
                next_command=f"aws kms describe-key --key-id {self.key_id}",
            ) from error
