"""`weights export --upload`: what a hub is told, by the real client, over loopback."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from rftstream.errors import ConfigError, WeightsError
from rftstream.models.folders import hub
from rftstream.models.folders.hub import HubPlace
from tests.loopback import Asked, HttpServer

TOKEN = "hf_not_for_anybody"


class Hub(HttpServer):
    """Takes commits as the real one does, files inline."""

    def __init__(self) -> None:
        super().__init__(self.told)
        self.repositories: dict[str, bool] = {}
        """Name -> private."""
        self.branches: dict[str, dict[str, bytes]] = {}
        """name@branch -> files."""
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuses: str | None = None

    def told(self, asked: Asked) -> object:
        self.tokens.add(asked.key)
        if self.refuses:
            return 403, {}, {"X-Error-Message": self.refuses}
        if asked.path == "/api/repos/create":
            name = f"{asked.value['organization']}/{asked.value['name']}"
            status = 409 if name in self.repositories else 200
            # older and newer clients
            private = bool(asked.value.get("private")) or asked.value.get("visibility") == "private"
            self.repositories.setdefault(name, private)
            return status, {"url": f"{self.url}/{name}"}
        _, _, _, owner, name, verb, branch = asked.path.split("/")
        files = self.branches.setdefault(f"{owner}/{name}@{branch}", {})
        if verb == "preupload":
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": one["path"], **modes} for one in asked.value["files"]]}
        if verb == "commit":
            for line in map(json.loads, asked.body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                else:
                    assert line["value"]["encoding"] == "base64"
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.url}/{owner}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}
        assert verb == "branch", asked.path
        return {}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as server:
        # the client reads its environment once, when it is imported
        monkeypatch.setattr(hub, "HfApi", lambda **more: HfApi(endpoint=server.url, **more))
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "config.json").write_text("{}")
    (tmp_path / "v3" / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return tmp_path / "v3"


@pytest.mark.slow
def test_a_folder_goes_up_whole(fake_hub: Hub, folder: Path) -> None:
    url = hub.upload(folder, HubPlace("me/sums", None), private=True, message="version 3 of sums")
    assert url == f"{fake_hub.url}/me/sums/commit/{'0' * 40}"
    assert fake_hub.repositories == {"me/sums": True}
    assert fake_hub.branches == {"me/sums@main": {path.name: path.read_bytes() for path in folder.iterdir()}}
    assert fake_hub.messages == ["version 3 of sums"]
    assert fake_hub.tokens == {f"Bearer {TOKEN}"}
    hub.upload(folder, HubPlace("me/sums", "v4"), private=False, message="version 4 of sums")
    assert set(fake_hub.branches) == {"me/sums@main", "me/sums@v4"}


@pytest.mark.slow
def test_a_hub_that_refuses(fake_hub: Hub, folder: Path) -> None:
    fake_hub.refuses = "You have no rights to write to me."
    with pytest.raises(WeightsError) as error:
        hub.upload(folder, HubPlace("me/sums", None), private=False, message="m")
    text = str(error.value)
    assert f"{fake_hub.url}: refused me/sums with 403, You have no rights to write to me." in text
    assert f"{folder} is complete; send it again with `hf upload me/sums {folder}`" in text
    assert TOKEN not in text
    with pytest.raises(WeightsError, match=f"`hf upload me/sums {folder} --revision v4 --private`"):
        hub.upload(folder, HubPlace("me/sums", "v4"), private=True, message="m")


@pytest.mark.slow
def test_a_hub_that_is_away(fake_hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda **more: HfApi(endpoint="http://127.0.0.1:9", **more))
    with pytest.raises(WeightsError, match=r"127\.0\.0\.1:9: ConnectError: .* is complete; send it again with"):
        hub.upload(folder, HubPlace("me/sums", None), private=False, message="m")


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.places_of("me/sums", (), where="--upload") == [HubPlace("me/sums", None)]
    assert hub.places_of("me/sums@best", (7,), where="--upload") == [HubPlace("me/sums", "best")]
    assert hub.places_of("me/sums", (1, 7), where="--upload") == [HubPlace("me/sums", "v1"), HubPlace("me/sums", "v7")]
    for odd in ("sums", "me/sums/v1", "me/sums@", "https://hub/me/sums", "me/su ms"):
        with pytest.raises(ConfigError, match="expected OWNER/NAME or OWNER/NAME@BRANCH"):
            hub.places_of(odd, (), where="--upload")
    with pytest.raises(ConfigError, match="one branch for 2 versions; leave out @best"):
        hub.places_of("me/sums@best", (1, 7), where="--upload")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token of the hub; export HF_TOKEN"):
        hub.places_of("me/sums", (), where="--upload")
