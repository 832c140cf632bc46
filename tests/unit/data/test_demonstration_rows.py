"""Demonstrations from the forms that people have them in, and their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.loader import demonstrations_source
from rftstream.config.sections import DemonstrationsSection, MakeModel, ModelSection
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.demonstrations.rows import Demonstrations
from rftstream.data.demonstrations.tokens import tokenise
from rftstream.errors import ConfigError
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import HfRenderer

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **settings: Any) -> list[Demonstration]:
    opened = Demonstrations(DemonstrationsSection(source=demonstrations_source(str(path), Path()), **settings))
    return [opened[index].demonstration for index in range(len(opened))]


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def chat(*pairs: tuple[str, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for role, content in pairs)


QUESTION, ANSWER = ("user", "1+2="), ("assistant", "3")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said(QUESTION, ANSWER)},
        {"conversations": [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]},
        {"prompt": "1+2=", "completion": "3"},
        {"prompt": said(QUESTION), "completion": said(ANSWER)},
        {"prompt": "1+2=", "response": "3"},
    ],
)
def test_chats(tmp_path: Path, row: Any) -> None:
    (one,) = read(write(tmp_path, {**row, "grade": "A", "weight": 0.5}))
    assert one.messages == chat(QUESTION, ANSWER)
    assert (one.weight, one.info, one.source) == (0.5, {"grade": "A"}, "rows.jsonl")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
        {"prompt": said(QUESTION), "chosen": said(ANSWER), "rejected": said(("assistant", "4"))},
        {"chosen": said(QUESTION, ANSWER), "rejected": said(QUESTION, ("assistant", "4"))},
        {"prompt": "1+2=", "chosen": said(QUESTION, ANSWER), "rejected": said(QUESTION, ("assistant", "4"))},
    ],
)
def test_pairs(tmp_path: Path, row: Any) -> None:
    (one,) = read(write(tmp_path, row))
    assert one.preference is not None
    assert one.preference.prompt == chat(QUESTION)
    assert one.preference.chosen == chat(ANSWER)
    assert one.preference.rejected == chat(("assistant", "4"))


def test_columns_and_a_system_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, {"q": {"text": "1+2="}, "a": "3"})
    (one,) = read(path, columns={"prompt": "q.text", "completion": "a"}, system="Add.")
    assert one.messages == chat(("system", "Add."), QUESTION, ANSWER)


def test_a_pair_may_have_a_system_prompt_of_its_own(tmp_path: Path) -> None:
    pair = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
    own, usual = read(write(tmp_path, {**pair, "system": "Be brief."}, pair), system="Add.")
    for one, system in ((own, "Be brief."), (usual, "Add.")):
        assert one.preference is not None
        assert one.preference.prompt == chat(("system", system), QUESTION)
    assert own.demonstration_id != usual.demonstration_id


def test_a_system_prompt_that_whole_chats_leave_out_is_that_of_the_prompt(tmp_path: Path) -> None:
    whole = {"chosen": said(QUESTION, ANSWER), "rejected": said(QUESTION, ("assistant", "4"))}
    (one,) = read(write(tmp_path, {"prompt": said(("system", "Add."), QUESTION), **whole}), system="Other.")
    assert one.preference is not None
    assert one.preference.prompt == chat(("system", "Add."), QUESTION)


def test_the_id_is_that_of_what_is_learned(tmp_path: Path) -> None:
    row = {"prompt": "1+2=", "completion": "3"}
    one, same, other = read(
        write(tmp_path, row, {"messages": said(QUESTION, ANSWER), "page": 7}, {**row, "completion": "4"})
    )
    assert one.demonstration_id == same.demonstration_id != other.demonstration_id
    (elsewhere,) = read(write(tmp_path, row, name="other.jsonl"))
    assert elsewhere.demonstration_id == one.demonstration_id


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "hello"}, "found the columns text, expected messages, or prompt and completion"),
        ({"messages": said(QUESTION)}, "a chat of user, expected a turn of the assistant"),
        ({"messages": "3"}, "a chat of user"),
        ({"messages": []}, "the chat is an empty list"),
        ({"prompt": "1+2=", "completion": 3}, "the completion is a number"),
        ({"prompt": "1+2=", "completion": "3", "weight": -1}, "the weight is -1"),
        ({"prompt": "1+2=", "completion": "3", "weight": 10**400}, "the weight is 1000"),
        ({"conversations": [{"from": ["gpt"], "value": "3"}]}, "message 0 of the chat, expected {role, content}"),
        ({"prompt": "1+2=", "chosen": "3", "rejected": "3"}, "are the same"),
        ({"chosen": said(QUESTION, ANSWER), "rejected": said(("user", "?"), ANSWER)}, "begin with different messages"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    path = write(tmp_path, {"prompt": "1", "completion": "1"}, row)
    with pytest.raises(ConfigError, match=f"rows.jsonl:2: .*{problem}"):
        read(path)


@pytest.mark.slow
def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "2+2=", "completion": "4"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, *rows, name="train.jsonl")
    assert read(tmp_path / "rows.parquet") == [
        Demonstration(demonstration_id=one.demonstration_id, source="rows.parquet", messages=one.messages)
        for one in read(folder)
    ]


# --------------------------------------------------------------------------------------------- tokens


def texts(renderer: Any, segment: Segment) -> tuple[str, str]:
    """All of it, and what is trained on."""
    ids, mask = segment.token_ids.numpy(), segment.loss_mask.numpy()
    names = {0: "<eos>"}

    def text(some: Any) -> str:
        return "".join(names.get(int(one), renderer.decode([int(one)])) for one in some)

    return text(ids), text(ids[mask == 1])


def make_renderer(folder: Path, template: str | None = None) -> HfRenderer:
    characters = "0123456789+= <>abcdefghijklmnopqrstuvwxyz"
    section = ModelSection(make=MakeModel(characters=characters, width=8, heads=2), chat_template=template)
    return HfRenderer(prepare_model(section, folder / "model", 0))


def test_only_what_the_assistant_says_is_trained_on(tmp_path: Path) -> None:
    """With what ends it; all its turns in one segment, as the template writes them behind each other."""
    renderer = make_renderer(tmp_path, CHATML)
    one = Demonstration(
        demonstration_id="1", source="x",
        messages=chat(("system", "add"), QUESTION, ("assistant", " 3 "), ("user", "4+4="), ("assistant", "8")),
    )  # fmt: skip
    (segment,) = tokenise(one, renderer)[None]
    assert texts(renderer, segment) == (
        "<system>add<eos><user>1+2=<eos><assistant>3<eos><user>4+4=<eos><assistant>8<eos>",
        "3<eos>8<eos>",
    )


def test_a_template_without_an_end_gets_one(tmp_path: Path) -> None:
    """And since the next prompt does not have it, the next turn is a segment of its own, as explorers have it."""
    renderer = make_renderer(tmp_path)
    one = Demonstration(
        demonstration_id="1", source="x", messages=chat(QUESTION, ANSWER, ("user", "4+4="), ("assistant", "8"))
    )
    segments = tokenise(one, renderer)[None]
    assert [texts(renderer, one) for one in segments] == [("1+2=3<eos>", "3<eos>"), ("1+2=34+4=8<eos>", "8<eos>")]


def test_of_a_pair_only_the_answers_are_compared(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path, CHATML)
    path = write(
        tmp_path, {"prompt": said(("assistant", "go"), QUESTION), "chosen": "3", "rejected": said(("assistant", "5"))}
    )
    sides = tokenise(read(path)[0], renderer)
    assert {side: [texts(renderer, one)[1] for one in segments] for side, segments in sides.items()} == {
        "chosen": ["3<eos>"], "rejected": ["5<eos>"],
    }  # fmt: skip


def test_a_template_that_changes_earlier_turns_opens_segments(tmp_path: Path) -> None:
    """Thoughts of earlier turns are dropped, as some families do."""
    template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{{ m['content'] if loop.last else m['content'].split(' ')[-1] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    renderer = make_renderer(tmp_path, template)
    one = Demonstration(
        demonstration_id="1", source="x",
        messages=chat(QUESTION, ("assistant", "hm 3"), ("user", "4+4="), ("assistant", "oh 8")),
    )  # fmt: skip
    assert [texts(renderer, segment)[1] for segment in tokenise(one, renderer)[None]] == ["hm 3<eos>", "oh 8<eos>"]


def test_the_fake_renderer_does_the_same() -> None:
    prompt, reply = FakeRenderer().render_turn(chat(QUESTION, ANSWER))
    assert (prompt, reply) == (tuple(b"1+2="), (*b"3", 0))
