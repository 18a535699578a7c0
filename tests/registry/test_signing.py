"""Signed checkpoints: whatever is lost, rotated or swapped, production moves only to what one of the keys signed."""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.store import TOKENIZER, WEIGHTS
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.io import commit
from pipeline.io.s3_client import new_client
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import read_checkpoint
from pipeline.registry.model import roll_back_model, roll_back_vectors, serve_verified_pair
from pipeline.registry.promote import promote
from pipeline.registry.records import Pointer, read_history
from pipeline.registry.signing import SIGNATURE, ModelKeys, check_signature, dsse_message, open_keys, open_signed
from pipeline.settings import Settings
from tests.registry.cases import AUTHOR, MODEL, Dying, Killed, consistent, passed, prefix, production
from tests.registry.conftest import ON_BOTH, Make
from tests.registry.test_serving import embedded, served

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
)
from moto.kms.utils import ECDSAPrivateKey

from tests.kit.keys import P384, P521, key_pair, keys_of, signing_settings


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with the key pairs a and b."""
    for name in "ab":
        key_pair(tmp_path, name)
    return tmp_path


def put(workspace: Storage, place: str, keys: ModelKeys) -> Pointer:
    decision = passed(workspace, place)
    return promote(workspace, MODEL, place, expected=production(workspace), decision=decision, author=AUTHOR, keys=keys)


def signature(workspace: Storage, place: str) -> bytes:
    return workspace.read_bytes(f"{place}/{SIGNATURE}")


def opened(workspace: Storage, place: str, folder: Path, *verify: str) -> bytes:
    """The weights of a checkpoint that embed, search, export and the like open."""
    settings = signing_settings(folder, "", *verify)
    return (open_signed(workspace, place, folder / "cache", settings).folder / WEIGHTS).read_bytes()


@ON_BOTH
def test_a_promotion_signs_and_a_reader_verifies(workspace: Storage, make: Make, pair: Path) -> None:
    put(workspace, make("a"), keys_of(pair, "a", "a"))
    assert opened(workspace, prefix("a"), pair, "b", "a") == b"weights of a 1"
    payload = json.loads(b64decode(json.loads(signature(workspace, prefix("a")))["dsseEnvelope"]["payload"]))
    names = [each["name"] for each in payload["predicate"]["resources"]]
    assert names == sorted(
        [MANIFEST_NAME, *json.loads(workspace.read_bytes(f"{prefix('a')}/{MANIFEST_NAME}"))["files"]]
    )
    assert consistent(workspace).actions == [("promoted", prefix("a"))]


@pytest.mark.parametrize("curve", [P384, P521])
def test_each_curve(workspace: Storage, make: Make, tmp_path: Path, curve: Any) -> None:
    key_pair(tmp_path, "large", curve)
    put(workspace, make("a"), keys_of(tmp_path, "large", "large"))
    assert opened(workspace, prefix("a"), tmp_path, "large")


def test_model_signing_reads_what_we_write(workspace: Storage, make: Make, pair: Path) -> None:
    pytest.importorskip("model_signing")
    from model_signing.verifying import Config

    put(workspace, make("a"), keys_of(pair, "a"))
    folder = workspace.local_path(prefix("a"))
    assert folder is not None
    Config().use_elliptic_key_verifier(public_key=pair / "a.pub").verify(folder, folder / SIGNATURE)
    with pytest.raises(ValueError, match="Key mismatch"):
        Config().use_elliptic_key_verifier(public_key=pair / "b.pub").verify(folder, folder / SIGNATURE)
    (folder / TOKENIZER).write_bytes(b"[]")
    with pytest.raises(ValueError, match=r"Hash mismatch for 'tokenizer.json'"):
        Config().use_elliptic_key_verifier(public_key=pair / "a.pub").verify(folder, folder / SIGNATURE)


def test_we_read_what_model_signing_writes(workspace: Storage, make: Make, pair: Path) -> None:
    """Signed elsewhere: promotion needs no key to sign with."""
    pytest.importorskip("model_signing")
    from model_signing.signing import Config

    folder = workspace.local_path(make("a"))
    assert folder is not None
    Config().use_elliptic_key_signer(private_key=pair / "a.pem").sign(folder, folder / SIGNATURE)
    before = signature(workspace, prefix("a"))
    put(workspace, prefix("a"), keys_of(pair, "", "a"))
    assert signature(workspace, prefix("a")) == before
    assert opened(workspace, prefix("a"), pair, "a")


def swap_file(workspace: Storage, place: str, other: str) -> None:
    workspace.write_bytes(f"{place}/{WEIGHTS}", workspace.read_bytes(f"{other}/{WEIGHTS}"))


def swap_manifest(workspace: Storage, place: str, other: str) -> None:
    workspace.write_bytes(f"{place}/{MANIFEST_NAME}", workspace.read_bytes(f"{other}/{MANIFEST_NAME}"))


def swap_both(workspace: Storage, place: str, other: str) -> None:
    for stat in [*workspace.list(other)]:
        if not stat.key.endswith(SIGNATURE):
            workspace.write_bytes(place + stat.key.removeprefix(other), workspace.read_bytes(stat.key))
    commit.verify_dir(workspace, place, deep=True)  # the checksums agree


def unsign(workspace: Storage, place: str, other: str) -> None:
    workspace.delete([f"{place}/{SIGNATURE}"])


def swap_signature(workspace: Storage, place: str, other: str) -> None:
    """One of the same key, which signed another model."""
    workspace.write_bytes(f"{place}/{SIGNATURE}", signature(workspace, other))


Swap = Callable[[Storage, str, str], None]
SWAPS = pytest.mark.parametrize("swap", [swap_file, swap_manifest, swap_both, unsign, swap_signature])


@pytest.mark.fault
@SWAPS
@ON_BOTH
def test_a_reader_refuses(workspace: Storage, make: Make, pair: Path, swap: Swap) -> None:
    keys = keys_of(pair, "a", "a")
    for name in "yx":
        put(workspace, make(name), keys)
    swap(workspace, prefix("x"), prefix("y"))
    with pytest.raises(CheckpointError) as caught:
        opened(workspace, prefix("x"), pair, "a")
    assert caught.value.exit_code == 74 and caught.value.expected and caught.value.next_command
    assert opened(workspace, prefix("y"), pair, "a") == b"weights of y 1"


@pytest.mark.fault
@SWAPS
def test_production_does_not_move_to_it(workspace: Storage, make: Make, pair: Path, swap: Swap) -> None:
    """Promoted by a process that only verifies, restored, or served: each is refused, and nothing has changed."""
    keys, verify = keys_of(pair, "a", "a"), keys_of(pair, "", "a")
    first, second = make("x"), make("y")
    for number, place in enumerate((first, second), 1):
        put(workspace, place, keys)
        serve_verified_pair(workspace, embedded(workspace, pair, f"c{number}", place, number), verify)
    before, pointer = served(workspace), production(workspace)
    swap(workspace, first, second)
    calls: list[Callable[[], object]] = [
        lambda: roll_back_model(workspace, MODEL, first, reason="bad", author=AUTHOR, keys=verify),
        lambda: roll_back_model(
            workspace, MODEL, first, reason="bad", author=AUTHOR, keys=verify, without_vectors=True
        ),
    ]
    if swap in (unsign, swap_signature):  # otherwise, it is a different model, which the gate has to judge
        calls.append(lambda: put(workspace, first, verify))
    for call in calls:
        with pytest.raises(CheckpointError):
            call()
    assert served(workspace) == before and production(workspace) == pointer
    assert [entry.action for entry in read_history(workspace, MODEL)] == ["promoted", "promoted"]


@pytest.mark.fault
@SWAPS
def test_vectors_of_it_are_not_served(workspace: Storage, make: Make, pair: Path, swap: Swap) -> None:
    keys, verify = keys_of(pair, "a", "a"), keys_of(pair, "", "a")
    for name in "yx":
        put(workspace, make(name), keys)
    pairs = [embedded(workspace, pair, f"c{number}", prefix("x"), number) for number in (1, 2, 3)]
    for each in pairs[:2]:
        assert serve_verified_pair(workspace, each, verify).startswith("serving.json: ")
    swap(workspace, prefix("x"), prefix("y"))
    with pytest.raises(CheckpointError):
        serve_verified_pair(workspace, pairs[2], verify)
    with pytest.raises(CheckpointError):
        roll_back_vectors(workspace, MODEL, "", reason="bad", author=AUTHOR, keys=verify)
    assert served(workspace) == (prefix("x"), "c2")


@pytest.mark.fault
def test_a_file_with_the_same_checksum_is_found(
    workspace: Storage, make: Make, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xxh3 is not cryptographic: whoever looks for another file with the same checksum finds one."""
    pointer = put(workspace, make("x"), keys_of(pair, "a", "a"))
    swap_file(workspace, prefix("x"), make("y"))
    monkeypatch.setattr(commit, "check_record", lambda uri, expected, actual: None)
    with pytest.raises(CheckpointError, match=r"model.safetensors has SHA-256"):
        opened(workspace, prefix("x"), pair, "a")
    before = signature(workspace, prefix("x"))
    for keys in (keys_of(pair, "a"), keys_of(pair, "a", "a"), keys_of(pair, "", "a")):
        with pytest.raises(CheckpointError, match=r"model.safetensors has SHA-256"):
            put(workspace, prefix("x"), keys)  # in production already, so it would be signed again
    assert signature(workspace, prefix("x")) == before and production(workspace) == pointer


def test_a_promotion_that_cannot_sign_changes_nothing(workspace: Storage, make: Make, pair: Path) -> None:
    pointer = put(workspace, make("x"), keys_of(pair, "a", "a"))
    make("y")

    def broken(message: bytes) -> bytes:
        raise ConfigError("AWS KMS refused to sign")

    keys = keys_of(pair, "a", "a")
    assert keys.signing is not None
    object.__setattr__(keys.signing, "sign", broken)
    with pytest.raises(ConfigError):
        put(workspace, prefix("y"), keys)
    assert consistent(workspace).pointer == pointer and workspace.stat(f"{prefix('y')}/{SIGNATURE}") is None


@pytest.mark.fault
@pytest.mark.parametrize("after", [False, True])
def test_a_promotion_killed_at_any_write_leaves_signed_production(
    workspace: Storage, make: Make, pair: Path, after: bool
) -> None:
    keys, verify = keys_of(pair, "a", "a"), keys_of(pair, "", "a")
    put(workspace, make("x"), keys)
    for number in count(1):
        place = make(f"y{number}")
        dying: Any = Dying(workspace, number, after)
        try:
            put(dying, place, keys)
            break
        except Killed:
            pointer = production(workspace)
            assert pointer is not None
            check_signature(workspace, pointer.checkpoint, _files(workspace, pointer.checkpoint), verify)
            put(workspace, place, keys)
    assert dying.writes == ["write_bytes", "write_if_match", "write_if_match"], "signature, pointer, history"
    assert number == 4 and len(consistent(workspace).history) == 5


def _files(workspace: Storage, place: str) -> Any:
    return read_checkpoint(workspace, place, every_byte=True).sha256


def test_a_signature_is_kept_or_replaced(workspace: Storage, make: Make, pair: Path) -> None:
    pointer = put(workspace, make("x"), keys_of(pair))
    with pytest.raises(CheckpointError, match="has no signature"):
        put(workspace, prefix("x"), keys_of(pair, "", "a"))
    assert put(workspace, prefix("x"), keys_of(pair, "a", "a")) == pointer, "the first one, for what is in production"
    first = signature(workspace, prefix("x"))
    assert put(workspace, prefix("x"), keys_of(pair, "a")) == pointer
    assert signature(workspace, prefix("x")) == first, "no second one of the same files by the same key"
    put(workspace, prefix("x"), keys_of(pair, "b", "a", "b"))
    assert signature(workspace, prefix("x")) != first
    assert opened(workspace, prefix("x"), pair, "b")
    make("x", watermark="2026-02-02")  # the cycle started over
    put(workspace, prefix("x"), keys_of(pair, "b", "b"))
    assert opened(workspace, prefix("x"), pair, "b")


def test_keys_rotate(workspace: Storage, make: Make, pair: Path) -> None:
    put(workspace, make("x"), keys_of(pair, "a", "a"))
    with pytest.raises(ConfigError, match=r"b.pem belongs to none of the keys in registry.verify_key \(.*a.pub\)"):
        keys_of(pair, "b", "a")
    put(workspace, make("y"), keys_of(pair, "b", "a", "b"))
    assert opened(workspace, prefix("x"), pair, "a", "b") and opened(workspace, prefix("y"), pair, "a", "b")
    for place, removed in (("x", "b"), ("y", "a")):
        with pytest.raises(CheckpointError, match="was not made by any of the keys"):
            opened(workspace, prefix(place), pair, removed)
    back = roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR, keys=keys_of(pair, "", "a", "b"))
    assert back.checkpoint == prefix("x")


@pytest.mark.parametrize(
    "settings", [{"sign_key": "gone.pem"}, {"verify_key": ["gone.pub"]}, {"sign_key": "a.pem", "verify_key": ["x/y"]}]
)
def test_a_lost_key_is_named(pair: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    monkeypatch.chdir(pair)
    with pytest.raises(ConfigError, match=r"(gone.p..|x/y) does not exist") as caught:
        open_keys(Settings.model_validate({"registry": settings}), StopSignal(), to_sign=True)
    assert caught.value.exit_code == 78


def test_a_reader_does_not_need_the_private_key(pair: Path) -> None:
    (pair / "a.pem").unlink()
    assert open_keys(signing_settings(pair, "a", "a"), StopSignal()).signing is None


def test_an_encrypted_key(workspace: Storage, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_pair(tmp_path, "safe", password="hunter22")
    for password in ("", "wrong"):
        monkeypatch.setenv("SIGN_KEY_PASSWORD", password)
        with pytest.raises(ConfigError, match=r"safe.pem is not a private key that can be read"):
            keys_of(tmp_path, "safe")
    monkeypatch.setenv("SIGN_KEY_PASSWORD", "hunter22")
    put(workspace, make("a"), keys_of(tmp_path, "safe", "safe"))
    assert opened(workspace, prefix("a"), tmp_path, "safe")


@pytest.mark.parametrize("sign", ["rsa", "k1", "public", "cut", "noise"])
def test_an_unusable_key_is_not_printed(pair: Path, sign: str) -> None:
    private = (pair / "a.pem").read_bytes()
    content = {"public": (pair / "a.pub").read_bytes(), "cut": private[:-40], "noise": b"\x00secret"}.get(sign)
    if content is None:
        other = rsa.generate_private_key(65537, 2048) if sign == "rsa" else ec.generate_private_key(ec.SECP256K1())
        content = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (pair / "bad.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad.pem is not a p") as caught:
        keys_of(pair, "bad")
    text = str(caught.value) + str(caught.value.__cause__)
    assert not any(line in text for line in content.decode(errors="ignore").splitlines() if len(line) > 5)
    (pair / "bad.pub").write_bytes(private)
    with pytest.raises(ConfigError, match=r"bad.pub is not a public key that can be used"):
        keys_of(pair, "", "bad")


def _bundle(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda bundle: {**bundle, "dsseEnvelope": {**bundle["dsseEnvelope"], **changes}}


@pytest.mark.fault
@pytest.mark.parametrize(
    "change",
    [
        _bundle(signatures=[]),
        _bundle(signatures=[{"sig": b64encode(b"no").decode()}]),
        _bundle(signatures=[{"sig": "*"}]),
        _bundle(signatures=None),
        _bundle(payload=b64encode(b"{}").decode()),
        _bundle(payload=3),
        lambda bundle: {},
        lambda bundle: [bundle],
    ],
)
def test_a_damaged_signature_is_refused(workspace: Storage, make: Make, pair: Path, change: Any) -> None:
    put(workspace, make("x"), keys_of(pair, "a", "a"))
    bundle = json.loads(signature(workspace, prefix("x")))
    workspace.write_bytes(f"{prefix('x')}/{SIGNATURE}", json.dumps(change(bundle)).encode())
    with pytest.raises(CheckpointError, match=SIGNATURE):
        opened(workspace, prefix("x"), pair, "a")


@pytest.mark.parametrize(
    "change", [{"predicateType": "https://slsa.dev/provenance/v1"}, {"_type": "x"}, {"predicate": {}}, {"predicate": 1}]
)
def test_another_statement_of_the_same_key_is_no_signature(
    workspace: Storage, make: Make, pair: Path, change: dict[str, Any]
) -> None:
    keys = keys_of(pair, "a", "a")
    put(workspace, make("x"), keys)
    bundle = json.loads(signature(workspace, prefix("x")))
    payload = json.dumps(json.loads(b64decode(bundle["dsseEnvelope"]["payload"])) | change).encode()
    assert keys.signing is not None
    bundle["dsseEnvelope"] |= {
        "payload": b64encode(payload).decode(),
        "signatures": [{"sig": b64encode(keys.signing.sign(dsse_message(payload))).decode()}],
    }
    workspace.write_bytes(f"{prefix('x')}/{SIGNATURE}", json.dumps(bundle).encode())
    with pytest.raises(CheckpointError, match="is not a signature of files"):
        opened(workspace, prefix("x"), pair, "a")


def test_nothing_is_signed_or_verified_without_keys(
    workspace: Storage, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.registry.keys", None)
    put(workspace, make("x"), keys_of(tmp_path))
    assert opened(workspace, prefix("x"), tmp_path)
    with pytest.raises(ConfigError, match="needs cryptography") as caught:
        keys_of(tmp_path, "a")
    assert caught.value.next_command == "pip install 'cryptography>=44'"


@pytest.mark.parametrize("spec", ["ECC_NIST_P256", "ECC_NIST_P384"])
@pytest.mark.parametrize("workspace_uri", ["s3"], indirect=True)
def test_a_key_in_kms(
    workspace: Storage, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    def sign_digest(self: ECDSAPrivateKey, message: bytes, signing_algorithm: str) -> bytes:
        """Sign as KMS does for MessageType=DIGEST, which moto does not know yet."""
        algorithm = {"ECDSA_SHA_256": SHA256(), "ECDSA_SHA_384": SHA384()}[signing_algorithm]
        signed: bytes = self.private_key.sign(message, ec.ECDSA(Prehashed(algorithm)))
        return signed

    monkeypatch.setattr(ECDSAPrivateKey, "sign", sign_digest)
    kms = new_client("kms")
    arn = kms.create_key(KeyUsage="SIGN_VERIFY", KeySpec=spec)["KeyMetadata"]["Arn"]
    key_pair(tmp_path, "a")
    uri = f"awskms:///{arn}"
    put(workspace, make("x"), keys_of(tmp_path, uri, uri))
    assert opened(workspace, prefix("x"), tmp_path, "a", uri)
    with pytest.raises(CheckpointError, match="was not made by any of the keys"):
        opened(workspace, prefix("x"), tmp_path, "a")
    public = load_der_public_key(kms.get_public_key(KeyId=arn)["PublicKey"])
    (tmp_path / "kms.pub").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert opened(workspace, prefix("x"), tmp_path, "kms"), "its public key in a file will do"

    pointer = production(workspace)
    make("y")
    gone = f"awskms:///{arn[:-12]}000000000000"
    with pytest.raises(ConfigError, match=r"AWS KMS refused reading the public key of awskms:///.*: NotFoundException"):
        put(workspace, prefix("y"), keys_of(tmp_path, gone))
    assert consistent(workspace).pointer == pointer


@pytest.mark.parametrize("workspace_uri", ["s3"], indirect=True)
def test_a_key_in_kms_for_something_else(workspace: Storage, tmp_path: Path) -> None:
    for asked in ({}, {"KeyUsage": "SIGN_VERIFY", "KeySpec": "RSA_2048"}):
        arn = new_client("kms").create_key(**asked)["KeyMetadata"]["Arn"]
        with pytest.raises(ConfigError):
            keys_of(tmp_path, f"awskms:///{arn}")


def test_another_checkpoint_is_refused_without_keys_too(workspace: Storage, make: Make, tmp_path: Path) -> None:
    put(workspace, make("x"), keys_of(tmp_path))
    pointer, settings = production(workspace), signing_settings(tmp_path, "")
    assert pointer is not None
    assert open_signed(workspace, prefix("x"), tmp_path / "cache", settings, digest=pointer.digest)
    with pytest.raises(CheckpointError, match=f"expected: {'0' * 32}, as recorded in the registry"):
        open_signed(workspace, prefix("x"), tmp_path / "cache", settings, digest="0" * 32)


def test_an_endpoint_that_is_no_url_for_a_key_in_kms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "foo")
    with pytest.raises(ConfigError, match="client for AWS kms: ValueError"):
        keys_of(tmp_path, "awskms:///alias/relevance")


def test_a_manifest_that_is_no_manifest(workspace: Storage, make: Make, pair: Path) -> None:
    put(workspace, make("x"), keys_of(pair, "a", "a"))
    workspace.write_bytes(f"{prefix('x')}/{MANIFEST_NAME}", b"{}")
    with pytest.raises(CheckpointError):
        opened(workspace, prefix("x"), pair, "a")
    with pytest.raises((CheckpointError, DataError)):
        _files(workspace, prefix("x"))
