"""The object store over a network that drops, delays, cuts off and refuses: a real S3 server behind a proxy."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import ClientError

from rftstream.contracts.versions import VersionName
from rftstream.errors import StoreRefused, StoreUnreachable, WeightsError, WeightsGone
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.stores import store_remote
from rftstream.weights.stores.store import ObjectStore
from tests.part_writers import PartWriters
from tests.proxy import DROPPED, SILENT, Fault, Proxy, proxy, refusal
from tests.s3 import BUCKET, S3Server

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def network(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between the store and the server."""
    monkeypatch.setattr(store_remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(store_remote, "PART_BYTES", 5 * MIB)  # S3 takes no smaller ones
    monkeypatch.setattr(store_remote, "READ_BYTES", 1 * MIB)
    with proxy(s3.url) as made:
        for name, value in {**s3.environment, "AWS_ENDPOINT_URL": made.url}.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def place() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def store_at(place: str, folder: Path, *, patience_s: float = 60.0, timeout_s: float = 30.0) -> ObjectStore:
    return ObjectStore(place, base=folder, patience_s=patience_s, timeout_s=timeout_s)


def begun_uploads(store: ObjectStore) -> list[str]:
    """Of several parts, neither completed nor aborted."""
    files = store._files
    assert isinstance(files, store_remote.RemoteFiles)
    prefix = store.url.removeprefix(f"s3://{BUCKET}/")
    answer = files._fs.call_s3("list_multipart_uploads", Bucket=BUCKET)
    return [one["Key"] for one in answer.get("Uploads", ()) if one["Key"].startswith(prefix)]


def test_a_small_object_through_a_bad_network(network: Proxy, place: str, tmp_path: Path) -> None:
    store = store_at(place, tmp_path)
    network.fail(DROPPED, Fault(request_bytes=300), Fault(answer_bytes=20), Fault(delay_s=0.05),
                 refusal(503, "SlowDown"), refusal(500, "InternalError"))  # fmt: skip
    stored = store.put("versions/1", b"x" * 100_000)
    assert stored.num_bytes == 100_000
    network.fail(DROPPED, Fault(answer_bytes=20), refusal(503, "ServiceUnavailable"), Fault(answer_bytes=50_000))
    assert store.get("versions/1") == b"x" * 100_000
    network.fail(DROPPED, DROPPED)
    assert store.list("versions/") == ["versions/1"]
    network.fail(DROPPED)
    store.delete("versions/1")
    network.fail(DROPPED)
    assert not store.exists("versions/1")


def test_an_upload_that_was_cut_off_is_made_again(network: Proxy, place: str, tmp_path: Path) -> None:
    """Whatever the server makes of half a request."""
    data = os.urandom(3 * MIB)
    store = store_at(place, tmp_path)
    store.exists("a")
    network.fail(*[Fault(request_bytes=count) for count in (MIB, 2 * MIB, 3 * MIB)])
    store.put("a", data)
    network.fail()
    assert store.get("a") == data


@pytest.mark.parametrize("size", [100, 12 * MIB])
def test_a_name_that_is_taken_during_the_upload_keeps_its_object(
    network: Proxy, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Two who ask at once whether it is free both hear that it is. A store that speaks S3's protocol, but not its
    conditions, refuses nobody."""
    store, theirs, ours = store_at(place, tmp_path), os.urandom(size), os.urandom(size)
    store_at(place, tmp_path).put("a", theirs)
    files = store._files
    assert isinstance(files, store_remote.RemoteFiles)
    with monkeypatch.context() as patched:
        patched.setattr(files._fs, "exists", lambda _: False)
        with pytest.raises(WeightsError, match="exists with other bytes, and no object is written twice"):
            store.put("a", ours)
        assert store.put("a", theirs).num_bytes == size, "the same bytes once more are no harm"
    assert (store.get("a"), begun_uploads(store)) == (theirs, [])
    for call in ("put_file", "call_s3"):
        monkeypatch.setattr(files._fs, call, without_conditions(getattr(files._fs, call)))
    store.put("b", ours)
    assert store.get("b") == ours


def without_conditions(call: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*arguments: Any, **how: Any) -> Any:
        if how.get("mode") == "create" or "IfNoneMatch" in how:
            answer = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
            raise OSError("A header implies functionality that is not implemented") from ClientError(
                answer, "PutObject"
            )  # type: ignore[arg-type]
        return call(*arguments, **how)

    return asked


def test_a_large_object_in_parts_through_a_bad_network(network: Proxy, place: str, tmp_path: Path) -> None:
    data = os.urandom(MIB) * 12
    store = store_at(place, tmp_path)
    network.fail(*[Fault(request_bytes=count) for count in (MIB, 2 * MIB, 4 * MIB)], DROPPED, Fault(answer_bytes=10))
    stored = store.put("large", data)
    assert stored.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert begun_uploads(store) == []
    network.fail(*[Fault(answer_bytes=count) for count in (MIB, MIB // 2, 300)])
    with store.open("large") as file:
        head = file.read(7 * MIB)
        network.fail(Fault(answer_bytes=MIB))
        assert head + file.read() == data


def test_a_server_that_does_not_answer_is_asked_again(network: Proxy, place: str, tmp_path: Path) -> None:
    store = store_at(place, tmp_path, timeout_s=0.5)
    network.fail(SILENT, SILENT)
    store.put("a", b"1")
    network.fail(SILENT)
    assert store.get("a") == b"1"


def test_patience_ends(network: Proxy, place: str, tmp_path: Path) -> None:
    store = store_at(place, tmp_path, patience_s=0.3, timeout_s=5.0)
    store.put("a", b"1")
    network.fail(always=DROPPED)
    for call in (store.get, store.size, store.exists, store.delete, lambda name: store.put(name, b"2"), store.list):
        with pytest.raises(WeightsError, match=r"given up after \d+ tr(y|ies) in .*; is the store reachable") as caught:
            call("a")
        assert not isinstance(caught.value, WeightsGone), "nobody knows"
        assert place in str(caught.value)


def test_what_asking_again_cannot_mend_is_not_asked_again(network: Proxy, place: str, tmp_path: Path) -> None:
    store = store_at(place, tmp_path)
    network.fail(always=refusal(403, "AccessDenied"))
    with pytest.raises(WeightsError, match=r"PermissionError: .*reachable, with room and rights") as caught:
        store.put("a", b"1")
    assert "given up" not in str(caught.value)
    assert network.num_connections <= 2, "s3fs asks in two ways whether an object is there"


KEYS_REFUSED = [refusal(403, "InvalidAccessKeyId"), refusal(400, "ExpiredToken"), refusal(403, "SignatureDoesNotMatch")]


def test_keys_that_were_rotated_or_have_expired_are_waited_for(network: Proxy, place: str, tmp_path: Path) -> None:
    """New ones may come; but a store that has never taken any refuses at once."""
    store = store_at(place, tmp_path)
    store.put("a", b"1")
    for call, expected in (
        (lambda: store.get("a"), b"1"), (lambda: store.exists("a"), True), (lambda: store.size("a"), 1),
        (lambda: store.put("b", b"2").num_bytes, 1), (lambda: store.list(""), ["a", "b"]),
    ):  # fmt: skip
        network.fail(*KEYS_REFUSED)
        assert call() == expected
    network.fail(always=refusal(403, "InvalidAccessKeyId"))
    with pytest.raises(StoreRefused):
        store_at(place, tmp_path).put("c", b"1")


def test_a_clock_that_is_apart_from_the_stores_is_waited_for_and_named(
    network: Proxy, place: str, tmp_path: Path
) -> None:
    refused = [refusal(403, code, behind_s=-3600) for code in ("RequestTimeTooSkewed", "AccessDenied")]
    store = store_at(place, tmp_path)
    network.fail(*refused)
    store.put("a", b"1")
    network.fail(*refused)
    assert (store.size("a"), store.get("a")) == (1, b"1")
    network.fail(always=refused[0])
    said = r"this machine's clock is 3[56]\d\d s behind the store's: set it; given up after"
    with pytest.raises(StoreUnreachable, match=said) as caught:
        store_at(place, tmp_path, patience_s=0.1).put("b", b"1")
    assert caught.value.exit_code == 3
    network.fail(always=refusal(403, "AccessDenied"))
    with pytest.raises(StoreRefused):
        store_at(place, tmp_path).put("b", b"1")


def test_a_large_upload_that_fails_leaves_nothing(network: Proxy, place: str, tmp_path: Path) -> None:
    data = os.urandom(MIB) * 11
    store = store_at(place, tmp_path, patience_s=1.0)
    network.fail(always=Fault(request_bytes=3 * MIB))  # questions get through, parts do not
    with pytest.raises(WeightsError, match=r"large: .*given up after \d+ tr(y|ies)"):
        store.put("large", data)
    network.fail()
    assert not store.exists("large")
    assert store.list() == []
    assert begun_uploads(store) == [], "it was aborted"
    store.put("large", data)
    assert store.get("large") == data


@pytest.mark.law("lineage")
def test_what_is_not_wholly_there_is_not_announced(network: Proxy, place: str, tmp_path: Path) -> None:
    store = store_at(place, tmp_path, patience_s=1.0)
    publisher = WeightsPublisher(store, "model", "float32", anchor_every=4)
    first = publisher.publish(tensors(0), name(0))
    network.fail(always=Fault(request_bytes=3 * MIB))
    with pytest.raises(WeightsError, match="given up"):
        publisher.publish(tensors(1), name(1))
    network.fail()
    second = publisher.publish(tensors(2), name(2))
    assert (second.parent, second.kind) == (None, "full"), "it begins anew after an error"
    follower = WeightsFollower(store, "model")
    assert follower.announced(first)
    assert follower.announced(second)
    assert bytes(follower.fetch(second)["w"].data) == bytes(tensors(2)["w"].data)


def test_a_fetch_that_is_cut_off_is_an_error_of_ours(network: Proxy, place: str, tmp_path: Path) -> None:
    """So an explorer goes on with what it has, and asks again."""
    publisher = WeightsPublisher(store_at(place, tmp_path), "model", "float32")
    announced = publisher.publish(tensors(0), name(0))
    follower = WeightsFollower(store_at(place, tmp_path, patience_s=0.3), "model")
    follower.announced(announced)
    network.fail(always=Fault(answer_bytes=MIB // 2))  # what is asked for at once is twice as much
    with pytest.raises(WeightsError, match="given up after"):
        follower.fetch(announced)
    network.fail()
    assert bytes(follower.fetch(announced)["w"].data) == bytes(tensors(0)["w"].data)


@pytest.mark.law("lineage")
def test_versions_in_parts_through_a_bad_network(network: Proxy, place: str, tmp_path: Path) -> None:
    store = store_at(place, tmp_path)
    publisher = WeightsPublisher(store, "m", "float32", anchor_every=2, writer=PartWriters(store, 3))
    near, late = WeightsFollower(store, "m"), WeightsFollower(store_at(place, tmp_path), "m")
    for version in range(4):
        state = {f"{number}.w": tensors(8 * (version if number else 0) + number)["w"] for number in range(3)}
        network.fail(DROPPED, Fault(request_bytes=MIB), refusal(503, "SlowDown"))
        told = publisher.publish(state, name(version), resumed=version == 0)
        assert len(told.parts) == 3
        assert near.announced(told) and late.announced(told)
        network.fail(DROPPED, Fault(answer_bytes=20), Fault(answer_bytes=MIB // 2))
        assert state_digest(near.fetch(told)) == told.weights_digest == state_digest(state)
    network.fail(Fault(answer_bytes=MIB // 2), DROPPED)
    assert state_digest(late.fetch(told)) == told.weights_digest


def name(version: int) -> VersionName:
    return VersionName(trainer_epoch=1, version=version)


def tensors(version: int) -> dict[str, RawTensor]:
    """8 MiB that change altogether with each version."""
    values = np.random.default_rng(version).standard_normal(2 * MIB).astype(np.float32)
    return {"w": RawTensor("F32", values.shape, memoryview(values).cast("B"))}
