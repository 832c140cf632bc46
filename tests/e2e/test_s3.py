"""A run whose weights and checkpoints lie on S3; the keys are in the environment and nowhere else."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import fsspec
import pytest

from rftstream.contracts.versions import WeightsAnnounced
from tests.e2e.workplace import RunView, Workplace, sets
from tests.s3 import BUCKET, KEYS, S3Server

pytestmark = pytest.mark.slow


def store(place: Workplace) -> str:
    """Of this test's runs, in the bucket that all tests share."""
    return f"s3://{BUCKET}/{place.folder.name}/{{run}}"


def objects(place: Workplace, s3: S3Server, run: str) -> dict[str, bytes]:
    """All that there are of a run."""
    client = fsspec.filesystem(
        "s3", endpoint_url=s3.url, key=KEYS["AWS_ACCESS_KEY_ID"], secret=KEYS["AWS_SECRET_ACCESS_KEY"],
        use_listings_cache=False, skip_instance_cache=True,
    )  # fmt: skip
    root = f"{BUCKET}/{place.folder.name}/{run}"
    return {name.removeprefix(f"{root}/"): client.cat_file(name) for name in client.find(root)}


def announced(run: RunView) -> list[WeightsAnnounced]:
    return [one for one in run.messages("weights") if isinstance(one, WeightsAnnounced)]


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def files_with(word: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


def test_a_run_on_s3_is_resumed_from_there_and_tells_nobody_its_keys(place: Workplace, s3: S3Server) -> None:
    settings = sets(f"weights.store={store(place)}", "log.level=debug")
    done = place.call("run", "tiny.toml", *settings, env=s3.environment)
    assert done.code == 0, done.err
    run = place.view("runs/tiny")
    assert not (run.folder.path / "weights").exists()
    names = set(objects(place, s3, "tiny"))
    assert announced(run)[-1].object in names
    assert any(name.startswith("checkpoints/") for name in names)

    resumed = place.call("resume", "runs/tiny", *sets("run.steps=9"), env=s3.environment)
    assert resumed.code == 0, resumed.err
    assert "starts from version 6 (epoch 2)" in run.log_of("trainer-0")
    assert [step.name.version for step in run.steps()] == list(range(1, 10))
    run.assert_nothing_lost()

    second = place.call("run", "tiny.toml", *settings, *sets("run.steps=1"), env=s3.environment)
    assert second.code == 0, "another run of the file has a place of its own"
    assert objects(place, s3, "tiny-2")
    for key in KEYS.values():
        assert not files_with(key, place.folder), "config, log, manifest, logs, and what was printed"


@pytest.mark.law("lineage")
def test_what_was_not_wholly_there_was_never_announced(place: Workplace, s3: S3Server) -> None:
    """The server stops answering, the trainer is killed while it writes; its successor has names of its own."""
    settings = sets(f"weights.store={store(place)}", "weights.keep=1000", "run.steps=100000")
    process = place.start("run", "tiny.toml", *settings, env=s3.environment)
    run = place.view("runs/tiny")
    place.wait_for(lambda: run.curve().version >= 3, "some steps")
    s3.process.send_signal(signal.SIGSTOP)
    try:
        place.wait_for(lambda: run.manifests()[-1].batch_sequence >= run.curve().version, "a batch to be published")
        place.kill_worker("trainer-0")
    finally:
        s3.process.send_signal(signal.SIGCONT)
    version = run.curve().version
    place.wait_for(lambda: run.curve().version > version + 2, "steps of another trainer")
    assert place.look("drain", "runs/tiny").code == 0
    done = process.finish()
    assert done.code == 0, done.err + place.report()
    run.assert_nothing_lost()
    stored, said = objects(place, s3, "tiny"), announced(run)
    assert {one.name.trainer_epoch for one in said} == {1, 2}
    given_up = {name for one in said for name in one.gone}
    for one in said:
        assert digest(stored[one.object]) == one.digest if one.object in stored else one.name in given_up
    assert run.curve().version in {
        one.name.version for one in said if one.name.trainer_epoch == 2 and one.object in stored
    }
