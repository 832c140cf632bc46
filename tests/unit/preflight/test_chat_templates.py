"""Chat templates: which one is in effect where, what it is given, and whether it keeps earlier turns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.loader import from_dict, to_toml
from rftstream.config.sections import MakeModel, ModelSection, RunConfig
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import copy_companions, for_section, model_digests, prepare_model
from rftstream.models.rendering import open_renderer, own_renderers
from rftstream.models.spec import ModelSpec
from rftstream.preflight.checks.check import check
from rftstream.preflight.checks.templates import CALL, first_break
from rftstream.runs.manifest import check_same_run, data_digests, make_manifest
from tests.suite.each import each

CHARACTERS = "0123456789+= \n<>/thinkSusa"
KEEPING = (
    "{% for m in messages %}{{ m.role[0] ~ '>' ~ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{{ 'a>' }}"
)
STRIPPING = (
    "{% for m in messages %}{{ m.role[0] ~ '>' }}{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') ~ eos_token }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{{ 'a>' }}"
)
TRIMMING = KEEPING.replace("m.content", "(m.content | trim)")
MOVING = (  # the system prompt stands before the last user's turn
    "{% for m in messages if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
    "{{ 'S' ~ messages[0].content }}{% endif %}{{ m.role[0] ~ '>' ~ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{{ 'a>' }}"
)
ENDLESS = KEEPING.replace("{{ eos_token }}", "")
CHAT = (ChatMessage(role="system", content="t"), ChatMessage(role="user", content="1+1="))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    section = ModelSection(make=MakeModel(characters=CHARACTERS, width=16))
    return prepare_model(section, tmp_path_factory.mktemp("model") / "model", 0)


def difference(spec: ModelSpec, template: str, messages: tuple[ChatMessage, ...] = CHAT, tools: Any = ()) -> str | None:
    renderer = open_renderer(dataclasses.replace(spec, chat_template=template))
    return first_break(renderer, messages, tools)


def config_of(folder: Path, **changes: Any) -> RunConfig:
    """`tasksets__sums__chat_template=...` and the like."""
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values: dict[str, Any] = {
        "run": {"name": "t", "steps": 1}, "model": {"make": {"characters": CHARACTERS, "width": 16}},
        "tasksets": {"sums": {"source": "jsonl:sums.jsonl"}}, "base": str(folder),
        "explorer": {"policy": "fake"}, "trainer": {"backend": "fake"},
    }  # fmt: skip
    for key, value in changes.items():
        *path, name = key.split("__")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return from_dict(values)


# --------------------------------------------------------------------------------------------- earlier turns


@each("template", [KEEPING, STRIPPING, TRIMMING, ENDLESS])
def test_templates_with_which_a_rollout_stays_one_segment(spec: ModelSpec, template: str) -> None:
    """Also if they drop earlier thoughts, trim, or write no end of a turn."""
    assert difference(spec, template) is None
    assert difference(spec, template, CHAT[1:]) is None


def test_a_template_that_moves_the_system_prompt(spec: ModelSpec) -> None:
    said = "after a plain reply turn 2 begins a new segment: template_changes_history (the template writes earlier "
    assert (difference(spec, MOVING) or "").startswith(said)
    assert difference(spec, MOVING, CHAT[1:]) is None


def test_a_template_that_hides_what_was_said(spec: ModelSpec) -> None:
    hiding = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ '>' }}"
    assert "a plain reply turn 2 begins a new segment: turn_hidden (" in (difference(spec, hiding) or "")


def test_a_template_is_asked_to_go_on_after_a_call_where_tools_are_offered(tmp_path: Path) -> None:
    characters = "".join(sorted({*"0123456789+= \n<>/thinkSusa", *CALL.format(name="add")}))
    section = ModelSection(make=MakeModel(characters=characters, width=16))
    made = prepare_model(section, tmp_path / "model", 0)
    refusing = KEEPING.replace(
        "{{ m.role", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.role"
    )
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    assert difference(made, refusing) is None
    assert "it refuses turn 2: " in (difference(made, refusing, tools=tools) or "")


def test_a_template_that_refuses_more_turns(spec: ModelSpec) -> None:
    once = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}1"
    assert "it refuses turn 2: " in (difference(spec, once) or "")
    assert "one turn only" in (difference(spec, once) or "")
    assert difference(spec, "{{ raise_exception('never') }}") is None  # said where the prompt itself is rendered


def test_check_warns_where_there_are_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_turns.py").write_text("from rftstream.environments.single_turn import SingleTurn as Game\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = check(config_of(tmp_path, model__chat_template=MOVING, tasksets__sums__system="t", sampling__max_tokens=4))
    assert (one.errors, one.warnings) == ([], [])
    assert (
        "note: with several turns the chat template would break rollouts into segments; here they have one"
        in one.to_text()
    )
    several = check(config_of(tmp_path, model__chat_template=MOVING, tasksets__sums__system="t", sampling__max_tokens=4,
                              tasksets__sums__environment="two_turns:Game"))  # fmt: skip
    (warning,) = several.warnings
    assert warning.startswith(
        "tasksets.sums: the chat template breaks rollouts of several turns into segments: after a"
    )
    assert "model.chat_template" in warning
    assert several.to_json()["tasksets"][0]["earlier_turns"] in warning
    kept = check(config_of(tmp_path, model__chat_template=KEEPING, sampling__max_tokens=4,
                           tasksets__sums__environment="two_turns:Game"))  # fmt: skip
    assert kept.warnings == []
    assert "note:" not in kept.to_text()


def test_check_warns_of_what_the_template_does_not_use_and_of_the_date(tmp_path: Path) -> None:
    text = KEEPING + "{% if enable_thinking %}1{% endif %}"
    report = check(config_of(tmp_path, model__chat_template=text, sampling__max_tokens=4,
                             model__chat_template_kwargs={"enable_thinkin": False}))  # fmt: skip
    assert report.warnings == ["model.chat_template_kwargs.enable_thinkin: the template does not use it; "
                               "known: enable_thinking; did you mean 'enable_thinking'?"]  # fmt: skip
    dated = KEEPING + "{% if date is not defined %}{{ strftime_now('%Y') }}{% endif %}"
    assert "puts the date in" in "".join(check(config_of(tmp_path, model__chat_template=dated)).warnings)
    fixed = check(config_of(tmp_path, model__chat_template=dated, model__chat_template_kwargs={"date": "1"}))
    assert "date" not in "".join(fixed.warnings)


# --------------------------------------------------------------------------------------------- which is in effect


def test_a_file_becomes_its_text(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(KEEPING)
    config = config_of(tmp_path, model__chat_template="own.jinja", tasksets__sums__chat_template="own.jinja")
    assert config.model.chat_template == config.tasksets["sums"].chat_template == KEEPING
    (tmp_path / "config.toml").write_text(to_toml(config))
    (tmp_path / "own.jinja").unlink()
    assert loader.load([tmp_path / "config.toml"], env={}) == config
    with pytest.raises(ConfigError, match=r"tasksets\.sums\.chat_template: .*own\.jinja: No such file"):
        config_of(tmp_path, tasksets__sums__chat_template="own.jinja")
    for data, text in ((b"plain", "nothing of a template in it"), (b"\xff{", "not UTF-8")):
        (tmp_path / "own.jinja").write_bytes(data)
        with pytest.raises(ConfigError, match=rf"model\.chat_template: .*{text}"):
            config_of(tmp_path, model__chat_template="own.jinja")


def test_a_taskset_or_an_evaluation_may_have_its_own(spec: ModelSpec, tmp_path: Path) -> None:
    config = config_of(
        tmp_path, tasksets__more={"source": "arithmetic"}, tasksets__sums__chat_template="{{ a }}{{ b }}",
        tasksets__sums__chat_template_kwargs={"b": 3}, evaluations__held={"source": "arithmetic"},
        evaluations__held__chat_template_kwargs={"a": 4},
    )  # fmt: skip
    spec = dataclasses.replace(spec, chat_template="{{ b }}{{ a }}", chat_template_kwargs={"a": 1, "b": 2})
    assert for_section(spec, config.tasksets["more"]) is spec
    (sums,) = own_renderers(spec, config.tasksets).values()
    (held,) = own_renderers(spec, config.evaluations).values()
    assert [one.decode(one.render(CHAT)) for one in (open_renderer(spec), sums, held)] == ["21", "13", "24"]
    report = check(dataclasses.replace(config, model=dataclasses.replace(config.model, chat_template="{{ 7 }}")))
    assert report.errors == []
    shown = {line.name: line.first.pieces for line in report.tasksets if line.first}
    assert shown == {"sums": ("3",), "more": ("7",), "held": ("7",)}


def test_another_template_is_another_run(tmp_path: Path) -> None:
    def digests(config: RunConfig) -> dict[str, str]:
        return data_digests(config, prepare_model(config.model, tmp_path / "model", 0))

    before = config_of(tmp_path, model__chat_template="1\n{{ a }}\n3\n", tasksets__sums__chat_template_kwargs={"a": 1})
    manifest = make_manifest(before, "t", digests(before), 0.0)
    assert manifest.digests.keys() == {"model", "tokenizer", "chat_template", "taskset.sums", "chat_template.sums"}
    check_same_run(manifest, before, digests(before))
    for changes, text in [
        ({"model__chat_template": "1\n{{ b }}\n3\n"},
         "another chat_template: model.chat_template line 2: '{{ a }}' -> '{{ b }}'"),
        ({"model__chat_template": "1\n{{ a }}\n3"},
         r"another chat_template: model.chat_template line 3: '3\n' -> '3'"),
        ({"model__chat_template": "1\r\n{{ a }}\n3\n"},
         r"another chat_template: model.chat_template line 1: '1\n' -> '1\r\n'"),
        ({"model__chat_template_kwargs": {"a": 2}},
         "another chat_template: model.chat_template_kwargs.a unset -> 2"),
        ({"tasksets__sums__chat_template_kwargs": {"a": 2}},
         "another chat_template.sums: tasksets.sums.chat_template_kwargs.a 1 -> 2"),
        ({"tasksets__sums__chat_template_kwargs": {}},
         "another chat_template.sums: tasksets.sums.chat_template_kwargs.a 1 -> unset"),
    ]:  # fmt: skip
        same = {"model__chat_template": "1\n{{ a }}\n3\n", "tasksets__sums__chat_template_kwargs": {"a": 1}}
        after = config_of(tmp_path, **{**same, **changes})
        with pytest.raises(ConfigError) as caught:
            check_same_run(manifest, after, digests(after))
        assert text in str(caught.value)


def test_the_final_folder_has_it_with_its_values(spec: ModelSpec, tmp_path: Path) -> None:
    kwargs = {"a": False, "b": [1, {"c": "2\n'\"ü"}], "d": "3"}
    template = "{% if a is false %}{{ b[0] }}{{ b[1].c[0] }}{% endif %}{{ d }}{{ messages[0].content }}"
    spec = dataclasses.replace(spec, chat_template=template, chat_template_kwargs=kwargs)
    copy_companions(spec, tmp_path)
    exported = dataclasses.replace(spec, folder=tmp_path, chat_template=None, chat_template_kwargs={})
    served = dataclasses.replace(exported, chat_template_kwargs={"d": "7", "a": True})
    message = (ChatMessage(role="user", content="4"),)
    assert [one.decode(one.render(message)) for one in map(open_renderer, (spec, exported, served))] == [
        "1234", "1234", "74"
    ]  # fmt: skip
    assert model_digests(exported)["chat_template"] != model_digests(spec)["chat_template"]
