"""Sign checkpoints when they are promoted, and verify them before they are served, exported or imported.

The signature of a folder is the file model.sig in it. It has the format of OpenSSF Model Signing v1.0, a Sigstore
bundle with an in-toto statement that lists the SHA-256 of every file, so `model_signing verify key` can read it, and
we can read what `model_signing sign key` writes. The package model-signing itself can only hash local folders, and
its public interface has no keys in AWS KMS.
"""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.core.optional import missing_package
from pipeline.core.stop import StopSignal
from pipeline.io.commit import verify_dir
from pipeline.io.storage import KeyNotFound, Storage, join_key, open_storage
from pipeline.settings import Settings

if TYPE_CHECKING:
    from pipeline.registry.keys import PublicKey, SigningKey

SIGNATURE = "model.sig"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
Digests = Mapping[str, str]
"""The SHA-256 in hex of the files of a folder, by name."""


@dataclass(frozen=True)
class ModelKeys:
    """The opened keys of the settings. If there is none, nothing is signed or verified."""

    signing: "SigningKey | None" = None
    public: "tuple[PublicKey, ...]" = ()


NO_KEYS = ModelKeys()


def open_keys(settings: Settings, stop: StopSignal, *, to_sign: bool = False) -> ModelKeys:
    """Open `registry.verify_key`, and `registry.sign_key` if `to_sign` is set.

    Raises ConfigError if a key does not exist or cannot be used, if the package cryptography is missing, or if
    verify_key would not accept what sign_key signs.
    """
    config, retry = settings.registry, settings.storage
    if not config.verify_key and not (to_sign and config.sign_key):
        return NO_KEYS
    try:
        from pipeline.registry.keys import open_public_key, open_signing_key
    except ImportError as error:
        raise missing_package("cryptography", "registry.verify_key or registry.sign_key", error) from error
    public = tuple(open_public_key(source, retry=retry, stop=stop) for source in config.verify_key)
    if not to_sign or not config.sign_key:
        return ModelKeys(None, public)
    signing = open_signing_key(config.sign_key, retry=retry, stop=stop)
    if public and signing.public.hint not in {key.hint for key in public}:
        raise ConfigError(
            f"registry.sign_key {config.sign_key} belongs to none of the keys in registry.verify_key"
            f" ({', '.join(config.verify_key)}), so the promoted model would be refused everywhere",
            expected="the public key of registry.sign_key in registry.verify_key, next to those it replaces",
            next_command="openssl pkey -in sign.pem -pubout -out verify.pem, and add it to registry.verify_key",
        )
    return ModelKeys(signing, public)


def make_signature(key: "SigningKey", name: str, files: Digests) -> bytes:
    """Sign the files of a folder and return the content of its model.sig. `name` is only informative."""
    digests = sorted(files.items())
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in digests)).hexdigest()
    ignored = sorted({SIGNATURE, MANIFEST_NAME} - files.keys())
    statement = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": ignored,
            },
            "resources": [{"name": name, "algorithm": "sha256", "digest": digest} for name, digest in digests],
        },
    }
    payload = json.dumps(statement).encode()
    signature = key.sign(dsse_message(payload))
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key.public.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode() + b"\n"


def dsse_message(payload: bytes) -> bytes:
    """Return the bytes that are signed, see "PAE" in the DSSE specification, v1."""
    return f"DSSEv1 {len(_PAYLOAD)} {_PAYLOAD} {len(payload)} ".encode() + payload


def read_signature(storage: Storage, prefix: str, keys: "Sequence[PublicKey]") -> "tuple[PublicKey, Digests]":
    """Verify the signature of a folder. Return the key that made it and the files that it covers.

    Raises CheckpointError if there is no signature, or if none of the keys has made it.
    """
    uri = storage.uri(join_key(prefix, SIGNATURE))
    try:
        bundle: Any = json.loads(storage.read_bytes(join_key(prefix, SIGNATURE)))
        payload = b64decode(bundle["dsseEnvelope"]["payload"])
        signatures = [b64decode(each["sig"]) for each in bundle["dsseEnvelope"]["signatures"]]
        message = dsse_message(payload)
        signer = next((key for key in keys if any(key.has_signed(message, each) for each in signatures)), None)
        if signer is None:
            raise _refused(
                f"{uri} was not made by any of the keys {', '.join(key.source for key in keys)}",
                next_command="if its key was replaced, add the old public key to registry.verify_key, or sign it again"
                " with trnpipe registry promote CHECKPOINT",
            )
        statement = json.loads(payload)
        kind = statement["_type"], statement["predicateType"], statement["predicate"]["serialization"]["method"]
        resources = statement["predicate"]["resources"]
        if kind != (_STATEMENT, _PREDICATE, "files") or {each["algorithm"] for each in resources} != {"sha256"}:
            raise ValueError("it has a different type")
        return signer, {str(each["name"]): str(each["digest"]) for each in resources}
    except KeyNotFound as error:
        raise _refused(
            f"{storage.uri(prefix)} has no signature ({SIGNATURE})",
            next_command="set registry.sign_key and run trnpipe registry promote CHECKPOINT, or sign a folder to import"
            " with model_signing sign key",
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refused(f"{uri} is not a signature of files", next_command="restore it, or sign the model again") from (
            error
        )


def check_files(storage: Storage, prefix: str, signed: Digests, files: Digests) -> None:
    """Raise CheckpointError for the first file that was not signed with this content, or that is missing."""
    for name in sorted(signed.keys() | files.keys()):
        if signed.get(name) != files.get(name):
            uri, seen = storage.uri(join_key(prefix, name)), files.get(name)
            raise _refused(
                f"{uri} has SHA-256 {seen}" if seen else f"{uri} is missing",
                expected=f"SHA-256 {signed[name]}, as signed" if name in signed else "only files that were signed",
                next_command="restore the signed files, or trnpipe registry rollback --reason TEXT",
            )


def _refused(
    seen: str, *, next_command: str, expected: str = "a model signed by one of the keys in registry.verify_key"
) -> CheckpointError:
    return CheckpointError(seen, expected=expected, next_command=next_command)


def check_signature(storage: Storage, prefix: str, files: Digests, keys: ModelKeys) -> None:
    """Verify that a folder with these files was signed, if there are keys to verify with.

    Raises CheckpointError if it was not, or if one of the files or the manifest has changed since.
    """
    if keys.public:
        check_files(storage, prefix, read_signature(storage, prefix, keys.public)[1], files)


def sign_checkpoint(workspace: Storage, prefix: str, files: Digests, keys: ModelKeys) -> None:
    """Sign a verified checkpoint that is about to be promoted, or verify its signature if there is no signing key.

    A signature of the same files and key is kept. Raises CheckpointError if the signature that the checkpoint has
    covers the same manifest, but different files.
    """
    if keys.signing is None:
        check_signature(workspace, prefix, files, keys)
        return
    own = keys.signing.public
    try:
        signer, signed = read_signature(workspace, prefix, (own, *keys.public))
    except CheckpointError:  # unsigned, or signed by an unknown key
        signer, signed = None, {}
    if signed.get(MANIFEST_NAME) == files[MANIFEST_NAME]:  # otherwise, the checkpoint was written again by its cycle
        check_files(workspace, prefix, signed, files)
    if signer is not own or signed != files:
        workspace.write_bytes(join_key(prefix, SIGNATURE), make_signature(keys.signing, prefix, files))


def sign_folder(folder: Path, keys: ModelKeys) -> None:
    """Sign all files in a local folder, if there is a signing key."""
    if keys.signing is not None:
        files = {}
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    files[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        (folder / SIGNATURE).write_bytes(make_signature(keys.signing, folder.name, files))


def open_signed(storage: Storage, prefix: str, cache_dir: Path, settings: Settings, *, digest: str = "") -> Checkpoint:
    """Open a checkpoint, and verify the signature of its local files if `registry.verify_key` is set.

    Also verify that it has the `digest` that the registry has recorded, if any, because a different checkpoint may have
    been copied here, even together with its signature. Raises CheckpointError if the checkpoint is missing, damaged,
    different or unsigned, or has changed since it was signed.
    """
    keys = open_keys(settings, storage.stop)
    checkpoint = open_checkpoint(storage, prefix, cache_dir)
    if digest not in ("", checkpoint.digest):
        raise _refused(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{digest}, as recorded in the registry",
            next_command="restore the promoted files, or trnpipe registry rollback --reason TEXT",
        )
    if keys.public:
        files, folder = dict[str, str](), checkpoint.folder
        try:
            verify_dir(open_storage(str(folder.parent), stop=storage.stop), folder.name, deep=True, sha256=files)
            data = storage.read_bytes(join_key(prefix, MANIFEST_NAME))
            if Manifest.from_json(data).digest != checkpoint.digest:
                raise DataError(f"{checkpoint.uri} is being replaced")
        except DataError as error:
            raise _refused(error.seen, next_command="run the same command again") from error
        check_signature(storage, prefix, {**files, MANIFEST_NAME: hashlib.sha256(data).hexdigest()}, keys)
    return checkpoint
