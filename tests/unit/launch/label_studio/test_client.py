"""Tokens, addresses and answers that are none: each error says what was found, expected, and what to do."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rftstream.contracts.feedback import FeedbackKind
from rftstream.errors import ConfigError, LabelStudioError, TransportError
from rftstream.integrations.label_studio import client
from rftstream.integrations.label_studio.bridge import RoundReport
from rftstream.integrations.label_studio.client import TOKEN_VARIABLE, LabelStudio, PersonalToken, seconds_of
from rftstream.integrations.label_studio.label_config import make_config, read_results
from rftstream.integrations.label_studio.serving import make_rounds
from rftstream.launch.health import Health
from tests.label_studio_server import PERSONAL, choice, words
from tests.loopback import HttpServer
from tests.suite.each import each

LEGACY = "0123456789abcdef0123456789abcdef01234567"


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, f" {PERSONAL}\n")
    assert PersonalToken().read() == PERSONAL
    file = tmp_path / "token"
    file.write_text(PERSONAL + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"everybody may read this token; chmod 600 .*token"):
        PersonalToken(file).read()
    file.chmod(0o600)
    assert PersonalToken(file).read() == PERSONAL
    file.write_text(LEGACY)
    with pytest.raises(ConfigError, match="perhaps a legacy token") as raised:
        PersonalToken(file).read()
    assert LEGACY not in str(raised.value)
    with pytest.raises(ConfigError, match="No such file or directory; expected a file with a personal access token"):
        PersonalToken(tmp_path / "nothing").read()
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: found no token"):
        PersonalToken().read()


@each("url", ["labels.example.org", "ftp://x", "http://ada:secret@x", "http://x:port", "http://x/?a=b", "http://ä.org"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--url: got") as raised:
        LabelStudio(url, PersonalToken())
    assert "secret" not in str(raised.value)


HTML = {"Content-Type": "text/html"}
ELSEWHERE = {"Location": "https://ada:secret@labels.example.org/api"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            (200, b"<html>log in</html>", HTML),
            "found text/html that is no JSON, expected Label Studio; is --url right",
        ),
        ((200, b"[" * 100_000, HTML), "no JSON"),
        ({"access": 5}, "found no access token in the answer"),
        ((302, b"", ELSEWHERE), r"leads to https://\*\*\*@labels.example.org/api, expected Label Studio"),
        ((500, f"<p>{PERSONAL} \n is wrong</p>"), r"500: <p>\*\*\* is wrong</p>"),
    ],
    ids=["html", "deep", "no token", "elsewhere", "wrong"],
)
def test_answers_that_are_none(
    answer: object, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    monkeypatch.setenv(TOKEN_VARIABLE, PERSONAL)
    with HttpServer(lambda _: answer) as answers:
        server = LabelStudio(answers.url, PersonalToken(), timeout_s=300)
        with pytest.raises(LabelStudioError, match=text):
            server.get("/api/projects/")
        server.cancel()
        with pytest.raises(LabelStudioError, match="cancelled"):
            server.get("/api/projects/")
    assert PERSONAL not in caplog.text


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    monkeypatch.setenv(TOKEN_VARIABLE, PERSONAL)
    with pytest.raises(LabelStudioError, match=r"Connection refused; is Label Studio up, and is --url right\?"):
        LabelStudio("http://127.0.0.1:9", PersonalToken()).get("/api/projects/")


def test_times() -> None:
    assert seconds_of("2026-11-24T16:20:18.320635Z") == 1795537218.320635
    assert seconds_of("2026-11-24T16:20:18") is seconds_of(None) is seconds_of("yesterday") is None


# --------------------------------------------------------------------------------------------- what annotators see


@pytest.mark.parametrize("kind", [FeedbackKind.pair, FeedbackKind.rating, FeedbackKind.label])
def test_configs_are_whole_and_their_names_unique(kind: FeedbackKind) -> None:
    view = ElementTree.fromstring(make_config(kind, (1.0, 5.0)))
    names = [one.get("name") for one in view.iter() if one.get("name")]
    assert len(names) == len(set(names))
    assert {one.get("toName") for one in view.iter() if one.get("toName")} <= set(names)
    keys = [one.get("hotkey") for one in view.iter("Choice")]
    assert len(keys) == len(set(keys))
    if kind is FeedbackKind.rating:
        assert [one.get("value") for one in view.iter("Choice")][:5] == ["1", "2", "3", "4", "5"]


def test_scales_that_have_no_buttons() -> None:
    for scale, number in (((0.0, 1.5), '"1.5"'), ((0.0, 100.0), '"100"')):
        config = make_config(FeedbackKind.rating, scale)
        assert "<Number " in config and f"max={number}" in config
    config = make_config(FeedbackKind.rating, (-2.0, 2.0))
    assert [one.get("value") for one in ElementTree.fromstring(config).iter("Choice")][:5] == list(
        map(str, range(-2, 3))
    )


def test_numbers_stars_and_buttons_say_the_same() -> None:
    stars = {"from_name": "rating", "type": "rating", "value": {"rating": 4}}
    number = {"from_name": "rating", "type": "number", "value": {"number": 4.0}}
    for result in (stars, number, choice("rating", "4")):
        said = read_results([result], FeedbackKind.rating, original="", order=())
        assert said.answers == {FeedbackKind.rating: {"rating": 4.0}} and not said.unread
    for value in (True, None, "nan", "", {}):
        said = read_results([{**number, "value": {"number": value}}], FeedbackKind.rating, original="", order=())
        assert (said.answers, said.unread) == ({}, ("rating",))
    assert not read_results("nonsense", FeedbackKind.pair, original="", order=()).answers
    only_words = read_results([words("comment", "hm")], FeedbackKind.rating, original="", order=())
    assert not only_words.answers
    blank = read_results([words("correction", " 42\n")], FeedbackKind.rating, original="42", order=())
    assert not blank.answers, "blanks at the ends correct nothing"


# --------------------------------------------------------------------------------------------- its process


class Side:
    begun = 0

    def begin(self) -> None:
        self.begun += 1


class Rounds:
    """Rounds that end as they are told to; the last one ends the process."""

    def __init__(self, ended: threading.Event, *outcomes: Exception | None) -> None:
        self._ended, self._outcomes = ended, list(outcomes)

    def round(self) -> RoundReport:
        outcome = self._outcomes.pop(0)
        if not self._outcomes:
            self._ended.set()
        if outcome is not None:
            raise outcome
        return RoundReport()


def test_what_cannot_be_reached_is_waited_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended, side, down = threading.Event(), Side(), LabelStudioError("is down")
    rounds = Rounds(ended, down, down, TransportError("log away"), None, None, None)
    make_rounds(side, rounds, Health(), ended, 0.001)  # type: ignore[arg-type]
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "is down"), ("WARNING", "log away"), ("INFO", "all can be reached again"),
    ]  # fmt: skip
    assert side.begun == 1
    ended.clear()
    with pytest.raises(ConfigError):
        make_rounds(side, Rounds(ended, ConfigError("refused"), None), Health(), ended, 0.001)  # type: ignore[arg-type]
