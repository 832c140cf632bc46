"""Images in rows become references of messages, whatever form they have; what is wrong is found before the run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rftstream.contracts.tasks import ChatMessage, Media
from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.data.tasksets.files import JsonlTaskset
from rftstream.data.tasksets.images import image_in, with_images
from rftstream.errors import ConfigError
from rftstream.models.vision.images import data_url, digest_of


def png(color: str = "red", size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


RED = png()


def placed(value: Any, folder: Path, text: str = "What colour?") -> ChatMessage:
    (message,) = with_images([ChatMessage(role="user", content=text)], value, folder, "row 1")
    return message


@pytest.mark.parametrize("form", ["path", "data url", "bytes", "feature with bytes", "feature with a path", "a list"])
def test_every_form_of_an_image_is_the_same_reference(form: str, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    value = {
        "path": "pictures/red.png",
        "data url": data_url(RED, "image/png"),
        "bytes": RED,
        "feature with bytes": {"bytes": RED, "path": "elsewhere.png"},
        "feature with a path": {"bytes": None, "path": "pictures/red.png"},
        "a list": ["pictures/red.png"],
    }[form]
    (media,) = placed(value, tmp_path).media
    assert (media.digest, media.kind, media.num_bytes) == (digest_of(RED), "image/png", len(RED))
    assert (media.width, media.height) == (4, 3)
    assert media.url.startswith("file:" if "path" in form or form == "a list" else "data:")


def test_marks_say_which_message_shows_which_image(tmp_path: Path) -> None:
    messages = [
        ChatMessage(role="user", content="<image> before <image>"),
        ChatMessage(role="assistant", content="yes"),
        ChatMessage(role="user", content="and <image>?"),
    ]
    colors = [png(color) for color in ("red", "green", "blue")]
    shown = with_images(messages, colors, tmp_path, "row 1")
    found = [[media.digest for media in message.media] for message in shown]
    assert found == [[digest_of(colors[0]), digest_of(colors[1])], [], [digest_of(colors[2])]]
    with pytest.raises(ConfigError, match="3 marks <image> for 2 images"):
        with_images(messages, colors[:2], tmp_path, "row 1")
    with pytest.raises(ConfigError, match="without a message of the user"):
        with_images([ChatMessage(role="system", content="s")], RED, tmp_path, "row 1")


@pytest.mark.parametrize("path", ["../secret.png", "/etc/passwd", "https://example.com/a.png", "", 3])
def test_only_files_below_the_folder_of_the_data_are_images(path: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 1: an image is"):
        placed([path], tmp_path)


def test_what_cannot_be_shown_is_a_reference_too(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_bytes(b"no image at all")
    (media,) = placed("text.png", tmp_path).media
    assert (media.digest, media.kind) == (digest_of(b"no image at all"), "")
    assert placed("gone.png", tmp_path).media[0].digest == ""
    assert placed("data:image/png;base64,!!", tmp_path).media[0].digest == ""


def test_a_taskset_shows_images_of_a_column_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    data = tmp_path / "rows.jsonl"
    parts = [{"type": "image"}, {"type": "text", "text": "What colour?"}]
    rows = [
        {"prompt": "What colour?", "picture": "red.png", "answer": "red"},
        {"prompt": [{"role": "user", "content": parts}], "picture": ["red.png"], "answer": "red"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = JsonlTaskset(JsonlTaskset.Config(), location=str(data), columns={"images": "picture"}, system="Look.")
    for index in (0, 1):
        problem = taskset.problem(index)
        system, user = problem.messages
        assert not system.media
        assert [media.digest for media in user.media] == [digest_of(RED)]
        assert problem.info == {}
    (tmp_path / "red.png").unlink()
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no image at .*red.png"):
        JsonlTaskset(JsonlTaskset.Config(), location=str(data), columns={"images": "picture"}, system=None)


def test_a_column_that_nobody_names_shows_nothing() -> None:
    columns = Columns({}, system=None, config=TableConfig(), data_source="x")
    problem = columns.problem({"prompt": "p", "images": ["a.png"]}, "row 1")
    assert not problem.messages[0].media
    assert problem.info == {"images": ["a.png"]}
    with pytest.raises(ConfigError, match="parts other than text"):
        columns.problem({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "row 1")


def test_an_image_may_stand_in_its_reference() -> None:
    media = image_in(RED)
    assert media == Media(
        url=data_url(RED, "image/png"),
        digest=digest_of(RED),
        kind="image/png",
        num_bytes=len(RED),
        width=4,
        height=3,
    )
