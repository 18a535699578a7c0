"""S3 that throttles, breaks off, loses answers, refuses: what the caller sees of it."""

import secrets
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy
from pipeline.io.s3 import S3Storage
from pipeline.io.s3_client import S3Client, translate
from pipeline.io.storage import Storage, open_storage
from tests.io.conftest import Fault, Proxy
from tests.kit.counted import counted
from tests.kit.storages import BUCKET, FAST

pytestmark = pytest.mark.fault
MIB = 2**20


@pytest.fixture
def parted(proxy: Proxy, s3_uri: str, stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """Storage with the smallest parts that S3 allows."""
    monkeypatch.setattr("pipeline.io.s3.PART_BYTES", 5 * MIB)
    monkeypatch.setattr("pipeline.io.s3.NUM_TRANSFER_THREADS", 4)
    return S3Storage(S3Client(FAST, stop), BUCKET, s3_uri.split("/", 3)[3])


@pytest.fixture(scope="module")
def big_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MiB: two whole parts and a shorter one."""
    path = tmp_path_factory.mktemp("big") / "big.bin"
    path.write_bytes(secrets.token_bytes(MIB) * 12)
    return path


def open_uploads(storage: S3Storage) -> int:
    prefix = storage.root.split("/", 3)[3]
    found: dict[str, list[object]] = storage._client.raw.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return len(found.get("Uploads", ()))


def test_throttled_requests_are_repeated(s3: Storage, proxy: Proxy) -> None:
    proxy.faults = [Fault("slow_down", "PUT", "x", times=2), Fault("slow_down", "GET", "x", times=1)]
    s3.write_bytes("x", b"data")
    assert s3.read_bytes("x") == b"data"
    assert [method for method, path in proxy.seen if "x" in path] == ["PUT"] * 3 + ["GET"] * 2


def test_a_spent_deadline_is_transient(proxy: Proxy, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.time", SimpleNamespace(monotonic=count(0.0, 0.02).__next__))
    storage = open_storage(s3_uri, retry=RetryPolicy(first_wait_s=0.01, max_wait_s=0.02, total_deadline_s=0.1))
    proxy.faults = [Fault("slow_down", "PUT", times=10_000)]
    with pytest.raises(TransientError, match="SlowDown, HTTP 503"):
        storage.write_bytes("x", b"data")
    assert proxy.faults[0].hits > 1


def test_a_stop_ends_the_retries(s3: Storage, proxy: Proxy, stop: StopSignal) -> None:
    proxy.faults = [Fault("slow_down", "PUT", times=10_000, then=lambda: stop.set("SIGTERM"))]
    with pytest.raises(Preempted):
        s3.write_bytes("x", b"data")
    assert proxy.faults[0].hits == 1


@pytest.mark.parametrize("kind", ["cut", "lost"])
def test_broken_answers_are_read_again(s3: Storage, proxy: Proxy, kind: str) -> None:
    data = secrets.token_bytes(50_000)
    s3.write_bytes("x", data)
    reads: tuple[Callable[[], bytes], ...] = (
        lambda: s3.read_bytes("x"),
        lambda: s3.read_range("x", 100, 40_000),
        lambda: s3.open_read("x").read(),
    )
    for read in reads:
        proxy.faults = [Fault(kind, "GET", "/x")]
        assert read() in (data, data[100:40_100])
        assert proxy.faults[0].hits == 1


def test_forbidden_is_not_repeated(s3: Storage, proxy: Proxy) -> None:
    proxy.faults = [Fault("denied", "PUT", times=10)]
    with pytest.raises(ConfigError, match="PutObject"):
        s3.write_bytes("a", b"")
    assert proxy.faults[0].hits == 1


def test_open_without_the_right_to_ask_about_the_bucket(proxy: Proxy, s3_uri: str) -> None:
    proxy.faults = [Fault("denied", "HEAD")]
    storage = open_storage(s3_uri, retry=FAST)
    storage.write_bytes("x", b"1")
    assert storage.read_bytes("x") == b"1"


def test_a_missing_bucket_is_one_clear_config_error(aws: str) -> None:
    with pytest.raises(ConfigError, match=r"bucket not-there does not exist.*\n.*\n.*aws s3 mb s3://not-there"):
        open_storage("s3://not-there/prefix", retry=FAST)


def test_a_bucket_that_vanished(proxy: Proxy) -> None:
    storage = S3Storage(S3Client(FAST, StopSignal()), "gone", "p")
    for use in (lambda: storage.write_bytes("x", b""), lambda: storage.read_bytes("x"), lambda: list(storage.list(""))):
        with counted(storage) as counts, pytest.raises(ConfigError, match="bucket gone does not exist"):
            use()
        assert counts.total() == 1, "not repeated"


def test_no_credentials(aws: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="credentials"):
        open_storage(f"s3://{BUCKET}/x", retry=FAST)


def test_an_endpoint_password_never_shows(aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://user:hunter2@127.0.0.1:9")
    with pytest.raises((ConfigError, TransientError)) as caught:
        open_storage(f"s3://{BUCKET}/x", retry=RetryPolicy(total_deadline_s=0))
    assert "hunter2" not in str(caught.value)


def test_our_own_create_is_recognised_when_its_answer_was_lost(s3: Storage, proxy: Proxy) -> None:
    proxy.faults = [Fault("lost", "PUT", "claim")]
    assert s3.write_if_absent("claim", b"mine")
    proxy.faults = [Fault("lost", "PUT", "claim")]
    assert not s3.write_if_absent("claim", b"mine"), "another writer's, although the bytes are the same"


def test_our_own_replace_is_recognised_when_its_answer_was_lost(s3: Storage, proxy: Proxy) -> None:
    s3.write_bytes("pointer", b"one")
    stat = s3.stat("pointer")
    assert stat is not None
    proxy.faults = [Fault("lost", "PUT", "pointer")]
    assert s3.write_if_match("pointer", b"two", stat.etag)
    assert s3.read_bytes("pointer") == b"two"


def test_a_conflict_is_repeated_until_it_is_decided(s3: Storage, proxy: Proxy) -> None:
    proxy.faults = [Fault("conflict", "PUT", "claim", times=2)]
    assert s3.write_if_absent("claim", b"mine")
    assert proxy.faults[0].hits == 2
    proxy.faults = [Fault("conflict", "PUT", "claim")]
    assert not s3.write_if_absent("claim", b"theirs")


def test_parallel_parts(parted: S3Storage, proxy: Proxy, big_file: Path, tmp_path: Path) -> None:
    proxy.faults = [Fault("slow_down", "PUT", "partNumber=2"), Fault("lost", "PUT", "partNumber=1")]
    parted.upload(big_file, "big")
    proxy.faults = [Fault("cut", "GET", "/big", times=2), Fault("slow_down", "GET", "/big")]
    parted.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == big_file.read_bytes()
    # 3 parts each way; a broken part alone is sent again.
    assert sum(method == "PUT" for method, _ in proxy.seen) == 3 + 2
    assert sum(method == "GET" for method, _ in proxy.seen) == 3 + 3
    assert open_uploads(parted) == 0


def test_a_lost_answer_to_the_last_request_of_an_upload(parted: S3Storage, proxy: Proxy, big_file: Path) -> None:
    proxy.faults = [Fault("lost", "POST", "uploadId")]
    parted.upload(big_file, "big")
    stat = parted.stat("big")
    assert stat is not None and stat.size_bytes == 12 * MIB


def test_a_stopped_upload_is_aborted(parted: S3Storage, proxy: Proxy, big_file: Path, stop: StopSignal) -> None:
    proxy.faults = [Fault("slow_down", "PUT", "partNumber", times=9, then=lambda: stop.set("SIGTERM"))]
    with pytest.raises(Preempted):
        parted.upload(big_file, "big")
    assert open_uploads(parted) == 0
    assert [method for method, _ in proxy.seen].count("DELETE") == 1


def test_a_stopped_download_leaves_nothing(
    parted: S3Storage, proxy: Proxy, big_file: Path, tmp_path: Path, stop: StopSignal
) -> None:
    parted.upload(big_file, "big")
    proxy.faults = [Fault("cut", "GET", "/big", times=9, then=lambda: stop.set("SIGTERM"))]
    with pytest.raises(Preempted):
        parted.download("big", tmp_path / "back" / "file")
    assert not list((tmp_path / "back").iterdir())


def test_an_object_replaced_during_its_download(
    parted: S3Storage, proxy: Proxy, big_file: Path, tmp_path: Path
) -> None:
    parted.upload(big_file, "big")
    other = S3Storage(S3Client(FAST, StopSignal()), BUCKET, parted.root.split("/", 3)[3])
    once = threading.Lock()

    def replace() -> None:
        if once.acquire(blocking=False):
            other.write_bytes("big", b"new")

    proxy.faults = [Fault("", "GET", "/big", times=1, then=replace)]
    with pytest.raises(TransientError, match="was replaced"):
        parted.download("big", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_archived_object_is_no_matter_of_rights() -> None:
    answer = {"Error": {"Code": "InvalidObjectState"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    error = translate(ClientError(answer, "GetObject"), "reading", "s3://b/k")
    assert isinstance(error, DataError) and "restore-object" in str(error.next_command)


def test_a_key_that_cannot_be_deleted(s3: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(s3, S3Storage)
    errors = [{"Key": "x", "Code": "AccessDenied", "Message": "no"}]
    monkeypatch.setattr(s3._client.raw, "delete_objects", lambda **_: {"Errors": errors})
    with pytest.raises(ConfigError, match="AccessDenied"):
        s3.delete(["x"])


def test_long_listings_and_deletions(s3: Storage) -> None:
    assert isinstance(s3, S3Storage)
    raw = s3._client.raw
    pages = raw.list_objects_v2
    for number in range(7):
        s3.write_bytes(f"many/{number:03d}", b"")
    raw.list_objects_v2 = lambda **options: pages(**options, MaxKeys=3)
    assert [stat.key for stat in s3.list("many")] == [f"many/{number:03d}" for number in range(7)]
    with counted(s3) as counts:
        s3.delete_prefix("many")
        assert list(s3.list("many")) == []
    assert counts == {"list": 3 + 1, "delete": 1}
