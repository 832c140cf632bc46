"""Media in the store of a run: written once under their digest, read back checked, never more than they may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts.tasks import ChatMessage, Media, Problem
from rftstream.data.tasksets.images import image_in
from rftstream.errors import ImageError
from rftstream.models.vision import images
from rftstream.models.vision.images import digest_of
from rftstream.weights.stores.media import MediaStore, copy_media
from rftstream.weights.stores.store import ObjectStore
from tests.unit.data.test_images import RED, png


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore("file://weights", base=tmp_path)


def problem_with(*shown: Media) -> Problem:
    return Problem(messages=(ChatMessage(role="user", content="?", media=shown), ChatMessage(role="user", content="!")))


def test_images_of_problems_are_objects_under_their_digest(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    in_file = replace(image_in(RED), url=(tmp_path / "red.png").as_uri())
    kept = MediaStore(store).keep_problem(problem_with(image_in(RED), in_file, image_in(png("blue"))))
    red, again, blue = kept.messages[0].media
    assert red == again
    assert (red.digest, red.width, red.height) == (digest_of(RED), 4, 3)
    assert len(store.list("media/")) == 2
    (tmp_path / "red.png").unlink()
    media = MediaStore(store)
    assert (media.get(red), media.get(blue)) == (RED, png("blue"))
    assert media.keep_problem(kept) == kept
    alone = Problem(messages=(ChatMessage(role="user", content="?"),))
    assert media.keep_problem(alone) is alone


def test_what_cannot_be_shown_is_not_stored(store: ObjectStore, tmp_path: Path) -> None:
    media = MediaStore(store)
    gone = Media(url=(tmp_path / "gone.png").as_uri(), digest="", kind="")
    text = replace(image_in(b"no image"), url="data:;base64,bm8gaW1hZ2U=")
    kept = media.keep_problem(problem_with(gone, text))
    assert [one.digest for one in kept.messages[0].media] == ["", digest_of(b"no image")]
    assert store.list("media/") == []


def test_environments_cannot_have_files_of_this_host_read(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    in_file = Media(url=(tmp_path / "red.png").as_uri(), digest="", kind="")
    (message,) = MediaStore(store).keep([ChatMessage(role="user", content="?", media=(in_file, image_in(RED)))])
    assert message.media[0] == in_file
    assert message.media[1].url.startswith("store:media/")


@pytest.mark.law("bounded")
def test_gone_damaged_and_large_objects_are_told_by_digest(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = MediaStore(store)
    (red,) = media.keep_problem(problem_with(image_in(RED))).messages[0].media
    file = tmp_path / "weights" / red.url.removeprefix("store:")
    file.chmod(0o644)
    file.write_bytes(png("blue"))
    with pytest.raises(ImageError, match=f"{red.digest}.*damaged"):
        media.get(red)
    monkeypatch.setattr("rftstream.weights.stores.media.MAX_IMAGE_BYTES", 10)
    with pytest.raises(ImageError, match=f"{red.digest}.*expected at most 10"):
        media.get(red)
    monkeypatch.undo()
    file.unlink()
    with pytest.raises(ImageError, match=f"{red.digest}: is not in the store any more"):
        media.get(red)
    with pytest.raises(ImageError, match="expected an object of the run's store"):
        media.get(replace(red, url="https://example.com/a.png"))


def test_a_copy_of_a_run_has_its_images(store: ObjectStore, tmp_path: Path) -> None:
    (red,) = MediaStore(store).keep_problem(problem_with(image_in(RED))).messages[0].media
    other = ObjectStore("file://other", base=tmp_path)
    copy_media(store, other)
    copy_media(store, other)
    assert MediaStore(other).get(red) == RED


@pytest.mark.law("bounded")
def test_pixels_are_bounded_before_an_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 11)
    bomb = image_in(RED)
    with pytest.raises(ImageError, match=f"{bomb.digest}: 4 x 3 pixels, expected at most 11"):
        images.check_image(bomb)
    with pytest.raises(ImageError, match="4 x 3 pixels"):
        images.open_image(RED, replace(bomb, width=0, height=0))
    monkeypatch.undo()
    with pytest.raises(ImageError, match="no image that can be read"):
        images.open_image(RED[:45], replace(bomb, digest=digest_of(RED[:45])))
    with pytest.raises(ImageError, match="the image is damaged"):
        images.open_image(RED, replace(bomb, digest=digest_of(b"")))
    assert images.open_image(RED, bomb).size == (4, 3)
