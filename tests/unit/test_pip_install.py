"""The commands that errors name to install what is missing."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from rftstream.errors import pip_install


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rftstream[data]'"),
        ({"url": "https://example.org/rftstream.whl", "archive_info": {}}, "pip install 'rftstream[data]'"),
        ({"url": "file:///src/rftstream", "dir_info": {}}, "pip install 'rftstream[data]'"),
        (
            {"url": "file:///my%20src/rftstream", "dir_info": {"editable": True}},
            "pip install -e '/my src/rftstream[data]'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_rftstream_came(
    monkeypatch: pytest.MonkeyPatch, origin: object, command: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert pip_install("rftstream[data]") == command


def test_a_package_is_named_as_it_is() -> None:
    assert pip_install("math-verify") == "pip install math-verify"
