"""TRL's dataset types, as jsonl, Parquet and a saved dataset: what is asked, what is learned, what is preferred."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.demonstrations.tokens import tokenise
from rftstream.errors import ConfigError
from tests.unit.data.test_demonstration_rows import chat, make_renderer, read, said, texts
from tests.unit.data.test_tasksets_hf import save_to_disk
from tests.unit.data.test_tasksets_sources import open_source

ASKED, TOLD, WRONG = ("user", "When is low tide?"), ("assistant", "At nine."), ("assistant", "At noon.")
PORT = {"type": "object", "properties": {"port": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": PORT}}
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
CALLED = [
    {"role": "user", "content": "When is low tide?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "tide", "content": "9:04"},
    {"role": "assistant", "content": "At nine."},
]


def stored(folder: Path, form: str, rows: list[dict[str, Any]]) -> str:
    """The rows in a file of this form; returns the source that names it."""
    if form == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"jsonl:{folder}/rows.jsonl"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        return f"parquet:{folder}/rows.parquet"
    save_to_disk(folder / "rows", [rows])
    return f"hf:{folder}/rows"


FORMS = pytest.mark.parametrize("form", ["jsonl", "parquet", "hf"])


@FORMS
@pytest.mark.parametrize(
    ("row", "asked", "info"),
    [
        ({"prompt": "Low tide is"}, chat(("user", "Low tide is")), {}),
        ({"prompt": said(("system", "Short."), ASKED)}, chat(("system", "Short."), ASKED), {}),
        ({"prompt": said(ASKED), "tools": [TOOL], "level": 2}, chat(ASKED), {"level": 2}),
        ({"prompt": "Low tide is", "completion": " at nine."}, chat(("user", "Low tide is")),
         {"completion": " at nine."}),
    ],
    ids=["standard", "conversational", "tools", "prompt-completion"],
)  # fmt: skip
def test_prompts_are_tasks(tmp_path: Path, form: str, row: dict[str, Any], asked: Any, info: dict[str, Any]) -> None:
    problem = open_source(stored(tmp_path, form, [row])).problem(0)
    assert (problem.messages, problem.info) == (asked, info)
    assert [tool["function"]["name"] for tool in problem.tools] == ["tide"] * ("tools" in row)


@FORMS
@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"messages": said(ASKED, TOLD)}, chat(ASKED, TOLD)),
        ({"prompt": "Low tide is", "completion": " nine."}, chat(("user", "Low tide is"), ("assistant", " nine."))),
        ({"prompt": said(ASKED), "completion": said(TOLD)}, chat(ASKED, TOLD)),
        ({"messages": [*said(ASKED), {"role": "assistant", "thinking": "Ebb.", "content": "At nine."}]},
         chat(ASKED, ("assistant", "<think>\nEbb.\n</think>\n\nAt nine."))),
    ],
    ids=["conversation", "standard", "conversational", "thinking"],
)  # fmt: skip
def test_completions_are_demonstrations(tmp_path: Path, form: str, row: Any, learned: tuple[ChatMessage, ...]) -> None:
    (one,) = read(Path(stored(tmp_path, form, [row])))
    assert (one.messages, one.preference, one.info) == (learned, None, {})


@FORMS
@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "Low tide is", "chosen": " at nine.", "rejected": " at noon."}, "Low tide is"),
        ({"chosen": "Low tide is at nine.", "rejected": "Low tide is at noon."}, "Low tide is at"),
        ({"chosen": "Low tide is nine.", "rejected": "Low tide is never."}, "Low tide is"),
        ({"chosen": "干潮は九時です", "rejected": "干潮は正午です"}, "干潮は"),
        ({"prompt": said(ASKED), "chosen": said(TOLD), "rejected": said(WRONG)}, ASKED[1]),
        ({"chosen": said(ASKED, TOLD), "rejected": said(ASKED, WRONG)}, ASKED[1]),
    ],
    ids=["standard", "standard-implicit", "whole-words", "without-spaces", "conversational", "conversational-implicit"],
)
def test_preferences_are_pairs(tmp_path: Path, form: str, row: dict[str, Any], asked: str) -> None:
    (one,) = read(Path(stored(tmp_path, form, [row])))
    pair = one.preference
    assert pair is not None
    assert pair.prompt == chat(("user", asked))
    for mine, theirs in ((pair.chosen, row["chosen"]), (pair.rejected, row["rejected"])):
        whole = theirs if isinstance(theirs, str) else theirs[-1]["content"]
        assert [message.role for message in mine] == ["assistant"]
        assert whole.removeprefix(asked) == mine[0].content


@FORMS
def test_calls_of_tools_are_learned_with_the_tools(tmp_path: Path, form: str) -> None:
    for name, tools in (("objects", [TOOL]), ("text", json.dumps([TOOL]))):
        (tmp_path / name).mkdir()
        (one,) = read(Path(stored(tmp_path / name, form, [{"messages": CALLED, "tools": tools}])))
        assert [message.role for message in one.messages] == ["user", "assistant", "tool", "assistant"]
        assert one.messages[1].tool_calls[0]["function"] == CALL["function"]
        assert [tool["function"]["name"] for tool in one.info["tools"]] == ["tide"]


KWARGS = {"brief": True}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][:1] }}{% if brief %}b{% endif %} {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% if brief %}b{% endif %} {% endif %}"
)


@FORMS
@pytest.mark.parametrize("values", [KWARGS, json.dumps(KWARGS)], ids=["object", "text"])
def test_a_row_may_have_values_for_the_template(tmp_path: Path, form: str, values: Any) -> None:
    row = {"messages": said(("user", "12"), ("assistant", "3"))}
    source = Path(stored(tmp_path, form, [{**row, "chat_template_kwargs": values}]))
    (one,) = read(source)
    assert one.info == {"chat_template_kwargs": KWARGS}
    (tmp_path / "plain").mkdir()
    (plain,) = read(Path(stored(tmp_path / "plain", "jsonl", [row])))
    assert one.demonstration_id != plain.demonstration_id
    renderer = make_renderer(tmp_path, TEMPLATE)

    def written(demonstration: Demonstration) -> str:
        (segment,) = tokenise(demonstration, renderer)[None]
        return texts(renderer, segment)[0]

    assert [written(one), written(plain)] == ["ub 12<eos>ab 3<eos>", "u 12<eos>a 3<eos>"]


@pytest.mark.parametrize(
    ("row", "said_by_error"),
    [
        ({"text": "Low tide."}, "the columns text, expected messages, or prompt and completion, or chosen and"),
        ({"prompt": "Low tide is", "completion": " no.", "label": False}, "and a label .*, expected chosen and rej"),
        ({"prompt": "Sum", "completions": ["1"], "labels": [True]}, "the columns prompt, completions, labels, exp"),
        ({"chosen": "Nine.", "rejected": "Noon."}, "chosen and rejected as texts that begin differently, expected"),
        ({"messages": CALLED, "tools": "tide"}, "tools are a text that is not JSON .*, expected a list of functions"),
        ({"messages": CALLED, "chat_template_kwargs": [1]}, "chat_template_kwargs is a list, expected an object"),
        ({"messages": CALLED, "chat_template_kwargs": "brief"}, "is a text that is not JSON .*, expected an object"),
    ],
)  # fmt: skip
def test_errors_name_columns(tmp_path: Path, row: dict[str, Any], said_by_error: str) -> None:
    source = stored(tmp_path, "jsonl", [row])
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: .*{said_by_error}"):
        read(Path(source))


def test_a_taskset_says_which_columns_there_are(tmp_path: Path) -> None:
    source = stored(tmp_path, "jsonl", [{"chosen": said(ASKED, TOLD), "rejected": said(ASKED, WRONG)}])
    with pytest.raises(ConfigError, match=r"no column 'prompt'; found chosen, rejected; set columns = \{ prompt"):
        open_source(source)
