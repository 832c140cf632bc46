import dataclasses
import json
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from rftstream.contracts.arrays import Array
from rftstream.contracts.rollouts import AgentCall, Segment, Turn
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.folders.folder import copy_companions
from rftstream.models.rendering import HfRenderer, joined, open_renderer, pieces_of_turns
from rftstream.models.spec import ModelSpec
from tests.unit import tiny

TEMPLATE = (
    "{%- for message in messages %}\n  {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ '<' ~ message['role'] ~ '>' }}\n{{ message['content'] | trim }}\n{% endif %}"
    "{%- if loop.last %}{% continue %}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHATS = [
    [ChatMessage(role="user", content="12+7=")],
    [ChatMessage(role="system", content=" 1 + <b>&'\" "), ChatMessage(role="user", content="Grüße\n\n中文 🙂  7")],
    [ChatMessage(role="user", content="1"), ChatMessage(role="assistant", content="2 "),
     ChatMessage(role="user", content="<eos>3<pad>")],
]  # fmt: skip

CHATS_OF_2 = [ChatMessage(role="user", content="2")]


MODEL = {"characters": string.printable + "üß中文🙂"}


def with_template(spec, text, **kwargs):
    return dataclasses.replace(spec, chat_template=text, chat_template_kwargs=kwargs)


def transformers_ids(folder, chat, template=None, tools=None):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = [{"role": one.role, "content": one.content} for one in chat]
    encoded = tokenizer.apply_chat_template(plain, add_generation_prompt=True, chat_template=template, tools=tools)
    return tokenizer, tuple(encoded["input_ids"])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_ids_and_text_are_those_of_transformers(spec, chat, template):
    renderer = HfRenderer(with_template(spec, template))
    tokenizer, expected = transformers_ids(spec.folder, chat, template)
    assert renderer.render(chat) == expected
    assert renderer.decode(expected) == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("template", "tools", "calls"),
    [(TEMPLATE, (), 1), (TEMPLATE, ({"type": "function"},), 3), ("{{ strftime_now('%Y') }}" + TEMPLATE, (), 3)],
    ids=["siblings", "with tools", "with a date"],
)
def test_siblings_are_rendered_once(spec, monkeypatch, template, tools, calls):
    renderer, rendered = HfRenderer(with_template(spec, template)), []
    render = renderer._template.render
    monkeypatch.setattr(renderer._template, "render", lambda *given: rendered.append(given) or render(*given))
    [ids] = {renderer.render(list(CHATS[0]), tools) for _ in range(3)}
    assert len(rendered) == calls
    assert renderer.render(CHATS[1], tools) != ids


@pytest.mark.parametrize(("chat", "calls"), [
    ([("user", "2"), ("user", "3")], 1), ([("user", "2"), ("assistant", "3"), ("user", "2")], 2),
    ([("user", "2" * 9000), ("user", "2" * 9000)], 2),
], ids=["first", "later turn", "long"])  # fmt: skip
def test_only_short_first_prompts_are_kept(spec, monkeypatch, chat, calls):
    renderer, rendered = HfRenderer(with_template(spec, TEMPLATE)), []
    render = renderer._template.render
    monkeypatch.setattr(renderer._template, "render", lambda *given: rendered.append(given) or render(*given))
    for _ in range(2):
        renderer.render([ChatMessage(role=role, content=content) for role, content in chat])
    assert len(rendered) == calls


def test_a_message_with_a_list_in_it_is_rendered_too(spec):
    renderer = HfRenderer(with_template(spec, TEMPLATE))
    assert renderer.render([dataclasses.replace(CHATS[0][0], tool_calls=[])]) == renderer.render(CHATS[0][:1])


def test_tools_reach_the_template(spec):
    tools = [{"type": "function", "function": {"name": "7"}}]
    rendered = HfRenderer(with_template(spec, TEMPLATE)).render(CHATS[0], tools)
    assert rendered == transformers_ids(spec.folder, CHATS[0], TEMPLATE, tools)[1]


def test_what_it_knows_of_the_model(tmp_path):
    renderer = open_renderer(spec := tiny.make(tmp_path))
    assert (renderer.stop_token_ids, renderer.context, renderer.vocabulary_size) == (frozenset({0}), 64, 17)
    assert open_renderer(dataclasses.replace(spec, context=32)).context == 32


def test_several_stop_tokens(spec, tmp_path):
    folder = shutil.copytree(spec.folder, tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert open_renderer(dataclasses.replace(spec, folder=folder)).stop_token_ids == {0, 5, 6}


def test_templates_of_the_folder_and_the_spec(spec):
    chat = [ChatMessage(role="user", content="2")]
    own, of_spec = open_renderer(spec), open_renderer(with_template(spec, "3{{ eos_token }}"))
    assert [one.decode(one.render(chat)) for one in (own, of_spec)] == ["2", "3"]
    assert own.digest != of_spec.digest
    assert open_renderer(spec).digest == own.digest


def test_what_the_template_is_given(spec):
    text = (
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}7{% endif %}{{ more.a }}"
    )
    chat = [ChatMessage(role="user", content="2")]
    plain, given = (HfRenderer(with_template(spec, text, **kwargs)) for kwargs in
                    ({"more": {"a": 3}}, {"enable_thinking": False, "more": {"a": 3}}))  # fmt: skip
    assert [one.decode(one.render(chat)) for one in (plain, given)] == ["23", "273"]
    assert plain.digest != given.digest
    assert given.names == {"messages", "enable_thinking", "more"}
    for name in ("messages", "tools", "add_generation_prompt", "not a name"):
        with pytest.raises(ConfigError, match=rf"chat_template_kwargs\.{name}: "):
            HfRenderer(with_template(spec, text, **{name: 1}))


@pytest.mark.parametrize("text", ["", "3+4", "<eos>1<pad>"])
def test_encode_is_of_the_text_as_it_is(spec, text):
    renderer = HfRenderer(with_template(spec, "{{ messages[0].content }}"))
    assert renderer.encode(text) == renderer.render([ChatMessage(role="user", content=text)])


def test_people_see_the_special_tokens_too(spec):
    """And a number where the tokenizer has no text at all."""
    renderer = HfRenderer(spec)
    ids = [*renderer.encode("3<eos><eos>4"), 5000]
    assert renderer.decode(ids) == "34"
    assert renderer.pieces(ids) == [("3", False), ("<eos><eos>", True), ("4", False), ("<5000>", True)]
    assert joined(FakeRenderer().pieces([*"ü2".encode(), 0])) == "ü2<end>"


def test_a_turn_is_read_by_its_own_tokens(spec):
    """Over all segments; a turn whose tokens are not there is its text."""
    renderer = HfRenderer(spec)

    def segment(prompt, said):
        ids = (*renderer.encode(prompt), *renderer.encode(said))
        mask = [0] * len(renderer.encode(prompt)) + [1] * len(renderer.encode(said))
        return Segment(token_ids=Array.of(ids, "int32"), loss_mask=Array.of(mask, "uint8"), versions=(),
                       behavior_logprobs=Array.of([0.0] * len(ids), "float32"))  # fmt: skip

    turns = [
        Turn(role="assistant", content="3", num_tokens=2), Turn(role="user", content="more<eos>"),
        Turn(role="assistant", content="4", num_tokens=3), Turn(role="assistant", content="lost", num_tokens=1),
    ]  # fmt: skip
    segments = [segment("1+2=", "3<eos>"), segment("1+2=3<eos>more", "<eos>4<eos>")]
    found = pieces_of_turns(renderer, turns, segments)
    assert [joined(one) for one in found] == ["3<eos>", "more<eos>", "<eos>4<eos>", "lost"]
    assert found[1] == [("more<eos>", False)], "a person's words"
    assert [joined(one) for one in pieces_of_turns(None, turns, segments)] == ["3", "more<eos>", "4", "lost"]


def test_a_character_without_a_token_is_named(tmp_path):
    renderer = open_renderer(tiny.make(tmp_path))
    with pytest.raises(
        ConfigError, match=r"has no token for 'w', '\?'; add what is missing to model\.make\.characters"
    ):
        renderer.render([ChatMessage(role="user", content="1w+?w")])


@pytest.mark.parametrize("place", ["list", "files", "both"])
def test_named_templates_are_those_of_transformers(spec, tmp_path, place):
    """Where tools are offered, `tool_use` is taken."""
    folder = shutil.copytree(spec.folder, tmp_path / "copy")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template; set model"):
        open_renderer(dataclasses.replace(spec, folder=folder))
    texts = {"default": "7{{ messages[0].content }}", "rag": "8", "tool_use": "9{{ tools | length }}"}
    if place != "files":
        old = texts if place == "list" else dict.fromkeys(texts, "0")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = [{"name": name, "template": text} for name, text in old.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if place != "list":
        (folder / "chat_template.jinja").write_text(texts.pop("default"))
        (folder / "additional_chat_templates").mkdir()
        for name, text in texts.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    named = dataclasses.replace(spec, folder=folder)
    (exported := tmp_path / "exported").mkdir()
    copy_companions(dataclasses.replace(named, chat_template_kwargs={"a": 1}), exported)
    for one in (named, dataclasses.replace(named, folder=exported)):
        for tools, text in ((), "72"), (({"type": "function"},), "91"):
            renderer = open_renderer(one)
            assert renderer.decode(ids := renderer.render(CHATS_OF_2, tools)) == text
            assert ids == transformers_ids(one.folder, CHATS_OF_2, tools=list(tools) or None)[1]


def test_named_templates_without_a_default(spec, tmp_path):
    folder = shutil.copytree(spec.folder, tmp_path / "copy")
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("8")
    with pytest.raises(ConfigError, match="has the chat templates rag, but no default; set model"):
        open_renderer(dataclasses.replace(spec, folder=folder))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
    ],
)
def test_bad_templates_are_said(spec, template, message):
    with pytest.raises(ConfigError, match=message):
        HfRenderer(with_template(spec, template)).render(CHATS[0])


def test_without_a_tokenizer_json_transformers_is_asked(spec, tmp_path):
    folder = shutil.copytree(spec.folder, tmp_path / "slow")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "1": 2, "2": 3, "12": 4}))
    (folder / "merges.txt").write_text("#version: 0.2\n1 2\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    renderer = open_renderer(dataclasses.replace(spec, folder=folder))
    assert renderer.render([ChatMessage(role="user", content="12")]) == (4,)
    assert renderer.decode([4, 1, 3]) == "122"


@pytest.mark.slow
def test_it_is_light(spec):
    code = (
        "import sys, pathlib; from rftstream.models import rendering, spec as specs; "
        "from rftstream.contracts.tasks import ChatMessage; "
        f"spec = specs.ModelSpec(name='x', folder=pathlib.Path({str(spec.folder)!r}), dtype='float32', context=None); "
        "rendering.open_renderer(spec).render([ChatMessage(role='user', content='1')]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_fake_renderer():
    renderer = open_renderer(ModelSpec(name="fake", folder=Path(), dtype="float32", context=9))
    assert isinstance(renderer, FakeRenderer)
    assert renderer.render([ChatMessage(role="user", content="1+1=")]) == (49, 43, 49, 61)
    assert renderer.decode([*"ü2".encode(), 0]) == "ü2"
    assert renderer.context == 9


def test_turns_of_an_agent_are_read_where_its_calls_were_sampled(spec):
    """The first segment goes on after the second one was begun."""
    renderer = HfRenderer(spec)
    rows = [[*renderer.encode("1="), *renderer.encode("3<eos>"), *renderer.encode("+4<eos>")], renderer.encode("5")]
    segments = [
        Segment(token_ids=Array.of(ids, "int32"), loss_mask=Array.of([1] * len(ids), "uint8"), versions=(),
                behavior_logprobs=Array.of([0.0] * len(ids), "float32"))
        for ids in rows
    ]  # fmt: skip
    places = [(0, 2, 2), (1, 0, 1), (0, 5, 2)]
    calls = [
        AgentCall(number=number, dialect="chat", request_digest="", tools_digest="", segment=segment, start=start,
                  count=count, finish_reason="stop")
        for number, (segment, start, count) in enumerate(places)
    ]  # fmt: skip
    turns = [Turn(role="assistant", content="", num_tokens=count) for _, _, count in places]
    shown = pieces_of_turns(renderer, turns, segments, calls)
    assert [joined(one) for one in shown] == ["3<eos>", "5", "4<eos>"]
