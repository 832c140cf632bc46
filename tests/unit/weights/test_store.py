"""The object store on disk and behind fsspec: names are written once, whole, and never outside the store."""

from __future__ import annotations

import hashlib
import os
import subprocess
import uuid
from pathlib import Path

import fsspec
import pytest

from rftstream.config import loader
from rftstream.errors import ConfigError, WeightsError, WeightsGone
from rftstream.runs.folder import RunFolder, open_store
from rftstream.weights.stores.store import INCOMING, ObjectStore
from tests.s3 import BUCKET, S3Server

SUMS = {"run": {"name": "sums", "steps": 1}, "model": {"path": "fake"}, "tasksets": {"a": {"source": "arithmetic"}}}


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    urls = {"file": "file://weights", "memory": f"memory://{uuid.uuid4().hex}/prefix"}
    return ObjectStore(urls.get(request.param) or request.getfixturevalue("s3_url"), base=tmp_path)


@pytest.fixture
def s3_url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of its own on a real server, of which the environment says where it is."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/prefix"


def test_what_is_put_can_be_got(store: ObjectStore) -> None:
    stored = store.put("versions/1.bin", b"hello")
    assert (stored.name, stored.num_bytes) == ("versions/1.bin", 5)
    assert stored.digest == f"sha256:{hashlib.sha256(b'hello').hexdigest()}"
    assert store.get("versions/1.bin") == b"hello"
    assert store.size("versions/1.bin") == 5
    assert store.exists("versions/1.bin")
    assert not store.exists("versions/2.bin")
    with store.open("versions/1.bin") as file:
        assert file.read(2) == b"he"


def test_list_and_delete(store: ObjectStore) -> None:
    for name in ("b/2", "a/1", "b/c/3", "top"):
        store.put(name, name.encode())
    assert store.list() == ["a/1", "b/2", "b/c/3", "top"]
    assert store.list("b/") == ["b/2", "b/c/3"]
    assert store.list("b/c") == ["b/c/3"]
    assert store.list("none/") == []
    store.delete("b/2")
    store.delete("b/2")
    assert store.list("b/") == ["b/c/3"]


@pytest.mark.law("lineage")
def test_names_are_written_once(store: ObjectStore) -> None:
    store.put("a", b"one")
    assert store.put("a", b"one").num_bytes == 3
    with pytest.raises(WeightsError, match="exists with other bytes"):
        store.put("a", b"two")
    assert store.get("a") == b"one"


def test_put_file_from_elsewhere_copies(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "somewhere.bin"
    path.write_bytes(b"x" * 1000)
    assert store.put_file("f", path).num_bytes == 1000
    path.write_bytes(b"changed")
    assert store.get("f") == b"x" * 1000


def test_put_file_from_scratch(store: ObjectStore) -> None:
    with store.scratch() as folder:
        (folder / "one").write_bytes(b"1")
        store.put_file("one", folder / "one")
    assert not folder.exists()
    assert store.get("one") == b"1"


@pytest.mark.law("lineage")
def test_nothing_is_there_when_writing_fails(store: ObjectStore) -> None:
    def fill(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyError("stop")

    with pytest.raises((KeyError, WeightsError)):
        store.write("a", fill)
    assert store.list() == []
    assert not store.exists("a")


@pytest.mark.parametrize("name", ["", "/a", "a/", "../a", "a/../b", "a//b", ".hidden", "a/.b", "a\\b", "a\0b", "."])
def test_no_name_leaves_the_store(store: ObjectStore, name: str) -> None:
    for call in (store.get, store.delete, store.exists, lambda one: store.put(one, b"")):
        with pytest.raises(WeightsError, match="object name"):
            call(name)


def test_what_is_not_there_is_gone(store: ObjectStore) -> None:
    for call in (store.get, store.open, store.size):
        with pytest.raises(WeightsGone, match="no such object"):
            call("versions/7")


def test_relative_and_absolute_urls(tmp_path: Path) -> None:
    ObjectStore("file://weights", base=tmp_path).put("a", b"1")
    assert (tmp_path / "weights" / "a").read_bytes() == b"1"
    ObjectStore(f"file://{tmp_path}/elsewhere", base=Path("/nowhere")).put("a", b"2")
    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"2"


def test_no_temporary_files_stay(tmp_path: Path) -> None:
    store = ObjectStore("file://w", base=tmp_path)
    store.put("a/b", b"1")
    outside = tmp_path / "outside"
    outside.write_bytes(b"2")
    store.put_file("c", outside)
    assert list((tmp_path / "w" / INCOMING).iterdir()) == []


def test_leftovers_of_dead_processes_are_swept(tmp_path: Path) -> None:
    store = ObjectStore("file://w", base=tmp_path)
    child = subprocess.Popen(["true"])
    child.wait()
    with store.scratch() as mine:
        host = mine.name.partition("+")[0]
        dead = mine.parent / f"{host}+{child.pid}+0-0"
        foreign = mine.parent / f"other-host+{child.pid}+0-0"
        dead.mkdir()
        foreign.mkdir()
        ObjectStore("file://w", base=tmp_path).put("a", b"1")
        assert mine.exists()
        assert foreign.exists()
        assert not dead.exists()


def test_errors_of_the_disk_are_ours(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"a file, not a folder")
    store = ObjectStore("file://w", base=tmp_path)
    with pytest.raises(WeightsError, match=r"file://w/.*is the store reachable"):
        store.put("a", b"1")


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = ObjectStore("file://w", base=tmp_path)
    store.put("a", b"1")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    with pytest.raises(WeightsError, match="other bytes"):
        store.put("a", b"2")


@pytest.mark.slow
def test_an_upload_to_s3_that_was_not_finished_is_not_there(s3_url: str, tmp_path: Path) -> None:
    store = ObjectStore(s3_url, base=tmp_path)
    files = fsspec.filesystem("s3")
    bucket, _, key = f"{s3_url.removeprefix('s3://')}/versions/1".partition("/")
    begun = files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    part = {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"], "PartNumber": 1}
    files.call_s3("upload_part", **part, Body=b"x" * 5_000_000)
    assert not store.exists("versions/1")
    assert store.list() == []
    with pytest.raises(WeightsGone):
        store.get("versions/1")
    store.put("versions/1", b"whole")
    assert store.get("versions/1") == b"whole"


@pytest.mark.slow
def test_objects_on_s3_of_several_parts(s3_url: str, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 60
    store = ObjectStore(s3_url, base=tmp_path)
    stored = store.put("large", data)
    assert stored.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert store.get("large") == data


@pytest.mark.slow
def test_a_bucket_that_is_missing_is_named(s3_url: str, tmp_path: Path) -> None:
    store = ObjectStore("s3://no-such-bucket/sums", base=tmp_path)
    with pytest.raises(WeightsError, match=r"s3://no-such-bucket/sums/a: .*bucket.*; make it") as caught:
        store.put("a", b"1")
    assert not isinstance(caught.value, WeightsGone)


def test_keys_in_a_url_are_refused_before_they_are_written_anywhere() -> None:
    with pytest.raises(ConfigError, match=r"weights\.store: got a URL with keys.*AWS_ACCESS_KEY_ID") as caught:
        loader.from_dict(SUMS | {"weights": {"store": "s3://me:hush@bucket/sums"}})
    assert "hush" not in str(caught.value)


def test_each_run_has_a_place_of_its_own(tmp_path: Path) -> None:
    config = loader.from_dict(SUMS | {"weights": {"store": f"file://{tmp_path}/{{run}}"}})
    open_store(config, RunFolder(tmp_path / "runs" / "sums-2")).put("a", b"1")
    assert (tmp_path / "sums-2" / "a").read_bytes() == b"1"


def test_unknown_schemes_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.store: 'nonsense://x'"):
        ObjectStore("nonsense://x", base=tmp_path)
