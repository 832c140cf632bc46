"""What users bring as tables: Parquet, and how the columns of any source become problems."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.contracts import codec
from rftstream.contracts.limits import LIMITS, MessageLimits
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task
from rftstream.data.tasksets import arrow, columns
from rftstream.data.tasksets.columns import PROBLEM_LIMITS, Columns, TableConfig
from rftstream.data.tasksets.fields import look_up
from rftstream.errors import ConfigError, pip_install
from tests.unit.data.test_tasksets_sources import open_source, user, write

GSM8K = [
    {"question": "Natalia sold 48 clips ...?", "answer": "She sold 48/2 = <<48/2=24>>24.\n48+24 = 72\n#### 72"},
    {"question": "Weng earns $12 ...?", "answer": "12/60 * 50 = 10\n#### 1,010"},
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": f"{number} + 1? Let's think step by step.", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
        "extra_info": {"index": number, "split": "train", "answer": None},
    }
    for number in range(3)
]


def parquet(path: Path, rows: list[dict[str, Any]], **settings: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **settings)
    return f"parquet:{path}"


def prompts(count: int, word: str = "question") -> list[dict[str, Any]]:
    return [{"prompt": f"{word} {number}"} for number in range(count)]


def refusal(source: str, **section: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_source(source, **section)
    return str(caught.value)


def recordable(problem: Problem) -> Problem:
    """As it comes out of the log."""
    ids = RolloutIds(rollout_id="t/0/0/0/0", group_id="t/0/0/0", taskset="t", sibling=0, group_size=1, sequence=0,
                     min_version=0)  # fmt: skip
    task = codec.decode(codec.encode(Task(ids=ids, problem=problem, sampling=Sampling(), seed=1)), "task")
    assert isinstance(task, Task)
    return task.problem


# --------------------------------------------------------------------------------------------- the usual layouts


def test_gsm8k_as_it_is(tmp_path: Path) -> None:
    section = {"columns": {"prompt": "question", "answer": "answer"}, "options": {"answer_after": "####"}}
    for source in (parquet(tmp_path / "gsm8k.parquet", GSM8K), write(tmp_path / "gsm8k.jsonl", *GSM8K)):
        taskset = open_source(source, **section)
        assert [taskset.problem(index).answer for index in range(2)] == ["72", "1,010"]
        assert taskset.problem(0) == Problem(
            messages=(ChatMessage(role="user", content="Natalia sold 48 clips ...?"),), answer="72",
            data_source="gsm8k",
        )  # fmt: skip


def test_verl_as_it_is(tmp_path: Path) -> None:
    section = {"columns": {"answer": "reward_model.ground_truth"}}
    for source in (parquet(tmp_path / "train.parquet", VERL), write(tmp_path / "train.jsonl", *VERL)):
        taskset = open_source(source, **section)
        assert len(taskset) == 3
        assert taskset.problem(2) == Problem(
            messages=(ChatMessage(role="user", content="2 + 1? Let's think step by step."),),
            answer="3",
            info={
                "ability": "math",
                "reward_model": {"ground_truth": "3", "style": "rule"},
                "extra_info": {"index": 2, "split": "train", "answer": None},
            },
            data_source="openai/gsm8k",
        )
        kept = open_source(source, **section, options={"keep": ["extra_info"]}).problem(1)
        assert kept.answer == "2"
        assert kept.info == {"extra_info": {"index": 1, "split": "train", "answer": None}}


def test_prompts_of_text_or_of_messages(tmp_path: Path) -> None:
    rows = [
        {"a": "plain", "m": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"a": "grüße 中文 🙂\x00", "m": [{"role": "user", "content": "v"}]},
    ]
    source = parquet(tmp_path / "x.parquet", rows)
    assert user(open_source(source, columns={"prompt": "a"}).problem(1)) == "grüße 中文 🙂\x00"
    for ours in ("prompt", "messages"):
        taskset = open_source(source, columns={ours: "m"}, system="mine")
        assert [one.content for one in taskset.problem(0).messages] == ["s", "u"]
        assert [one.content for one in taskset.problem(1).messages] == ["mine", "v"]
    assert user(open_source(source, columns={"prompt": "m.0.content"}).problem(0)) == "s"


def test_a_prompt_goes_before_the_messages_that_hold_its_solution(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    ]
    taskset = open_source(parquet(tmp_path / "x.parquet", rows))
    assert taskset.problem(0).messages == (ChatMessage(role="user", content="1+1?"),)
    only = [{"messages": [{"role": "user", "content": "1+1?"}]}]
    assert user(open_source(parquet(tmp_path / "y.parquet", only)).problem(0)) == "1+1?"


def test_messages_with_tool_calls_and_parts(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {
            "prompt": [
                {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"},
            ]
        }
    ]
    messages = open_source(write(tmp_path / "x.jsonl", *rows)).problem(0).messages
    assert messages == (
        ChatMessage(role="user", content="1+1"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="2", tool_call_id="c", name="add"),
    )
    rows[0]["prompt"][0]["content"] = "1+1"  # a table has one type for a field
    assert open_source(parquet(tmp_path / "x.parquet", rows)).problem(0).messages == messages


def test_tools_as_objects_or_as_json(tmp_path: Path) -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}},
        {"type": "function", "function": {"name": "now", "strict": True}},
    ]
    forms = [tools, json.dumps(tools), [json.dumps(tool) for tool in tools]]
    for form in forms:
        source = write(tmp_path / "x.jsonl", {"prompt": "p", "functions": form}, {"prompt": "q", "functions": None})
        taskset = open_source(source, columns={"tools": "functions"})
        assert taskset.problem(0).tools == tuple(tools)
        assert taskset.problem(1).tools == ()
    # In a table each function has the fields of all others, as nulls: they are none of its own.
    table = open_source(parquet(tmp_path / "x.parquet", [{"prompt": "p", "tools": [tools[1], {"type": "function"}]}]))
    assert table.problem(0).tools == (tools[1], {"type": "function"})
    for value, text in [("no", "not JSON"), ({"a": 1}, "tools are an object, expected"), ([1], "tool 0 is a num"),
                        (["["], "tool 0 is a text that is not JSON")]:  # fmt: skip
        assert text in refusal(write(tmp_path / "x.jsonl", {"prompt": "p", "tools": value}))


def test_values_of_all_types_reach_the_reward_as_plain_ones(tmp_path: Path) -> None:
    table = pa.table({
        "prompt": pa.array(["p", "q"]),
        "when": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5), None]),
        "day": pa.array([datetime.date(2026, 1, 2)] * 2),
        "price": pa.array([decimal.Decimal("1.50")] * 2),
        "large": pa.array([2**64 - 1, 0], pa.uint64()),
        "bytes": pa.array([b"text", b"\xff\x00"]),
        "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "half": pa.array([0.5, math.nan]),
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "nested": pa.array([[{"a": None, "b": [None, [1]]}], None]),
        "nothing": pa.nulls(2),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "x.parquet")
    taskset = open_source(f"parquet:{tmp_path}/x.parquet")
    problem = recordable(taskset.problem(0))
    assert problem.info == {
        "when": "2026-01-02T03:04:05", "day": "2026-01-02", "price": "1.50", "large": str(2**64 - 1), "bytes": "text",
        "map": {"a": 1}, "half": 0.5, "kind": "x", "nested": [{"a": None, "b": [None, [1]]}], "nothing": None,
    }  # fmt: skip
    other = recordable(taskset.problem(1)).info
    assert (other["large"], other["bytes"], other["kind"], other["nested"]) == (0, "/wA=", "y", None)
    assert math.isnan(other["half"])


# --------------------------------------------------------------------------------------------- files


def test_a_file_a_pattern_and_a_folder(tmp_path: Path) -> None:
    for name, count in (("b", 3), ("a", 2)):
        parquet(tmp_path / "data" / f"train-{name}.parquet", prompts(count, name))
    parquet(tmp_path / "data" / "deep" / "test.parquet", prompts(1, "deep"))
    (tmp_path / "data" / "_SUCCESS").touch()
    parquet(tmp_path / "data" / "_temporary" / "x.parquet", prompts(9))
    shown = {}
    for location in ("data/train-*.parquet", "data", "data/**/t*.parquet", "data/train-b.parquet"):
        taskset = open_source(f"parquet:{tmp_path / location}")
        shown[location] = [user(taskset.problem(index)) for index in range(len(taskset))]
    assert shown == {
        "data/train-*.parquet": ["a 0", "a 1", "b 0", "b 1", "b 2"],
        "data": ["deep 0", "a 0", "a 1", "b 0", "b 1", "b 2"],
        "data/**/t*.parquet": ["deep 0", "a 0", "a 1", "b 0", "b 1", "b 2"],
        "data/train-b.parquet": ["b 0", "b 1", "b 2"],
    }


@pytest.mark.parametrize("row_group_size", [1, 7, 300, 2_000])
def test_every_row_is_found_whatever_the_row_groups(tmp_path: Path, row_group_size: int) -> None:
    source = parquet(tmp_path / "x" / "1.parquet", prompts(1_000, "first"), row_group_size=row_group_size)
    parquet(tmp_path / "x" / "2.parquet", [{"other": 1, **row} for row in prompts(600, "second")])
    taskset = open_source(f"parquet:{tmp_path}/x")
    assert len(taskset) == 1_600
    for index in (0, 1_599, 255, 256, 999, 1_000, 3, 1_255):
        word, number = ("first", index) if index < 1_000 else ("second", index - 1_000)
        assert user(taskset.problem(index)) == f"{word} {number}"
    assert taskset.problem(1_000).info == {"other": 1}
    with pytest.raises(ConfigError, match="problem 1600, expected below 1600"):
        taskset.problem(1_600)
    assert len(open_source(source)) == 1_000


def test_only_the_columns_that_are_wanted_are_read(tmp_path: Path) -> None:
    source = parquet(tmp_path / "x.parquet", [{"prompt": "p", "answer": {"a": 1}, "long": "x" * 9, "id": 3}])
    path = Path(source.removeprefix("parquet:"))
    config = TableConfig(keep=("id",))
    columns = Columns({"answer": "answer.a"}, system=None, config=config, data_source="x")
    assert list(arrow.ArrowRows([path], columns, source).row(0)) == ["prompt", "answer", "id"]
    assert open_source(source, options={"keep": ["id"]}).problem(0).info == {"id": 3}
    assert open_source(source, options={"keep": []}).problem(0).info == {}
    some = write(tmp_path / "x.jsonl", {"prompt": "p", "id": 3}, {"prompt": "q"})
    assert open_source(some, options={"keep": ["id"]}).problem(1).info == {}
    assert "no column 'idd' to keep; found prompt, answer, long, id; did you mean 'id'?" in refusal(
        source, options={"keep": ["idd"]}
    )


def test_skip_and_size_give_parts_that_have_nothing_in_common(tmp_path: Path) -> None:
    for source in (parquet(tmp_path / "x.parquet", prompts(10)), write(tmp_path / "x.jsonl", *prompts(10))):
        train, held_out = open_source(source, options={"skip": 3}), open_source(source, options={"size": 3})
        assert [user(train.problem(index)) for index in range(len(train))] == [f"question {i}" for i in range(3, 10)]
        assert [user(held_out.problem(index)) for index in range(3)] == [f"question {i}" for i in range(3)]
        assert len({one.digest for one in (train, held_out, open_source(source))}) == 3
        assert len(open_source(source, options={"size": 99})) == 10
        assert "skip = 10, but there are only 10 rows" in refusal(source, options={"skip": 10})


def test_shuffled_parts_are_of_all_of_the_file_and_have_nothing_in_common(tmp_path: Path) -> None:
    names = {f"question {i}" for i in range(200)}
    for source in (parquet(tmp_path / "x.parquet", prompts(200)), write(tmp_path / "x.jsonl", *prompts(200))):
        parts = [open_source(source, options={"shuffle_seed": 7, **one}) for one in ({"skip": 20}, {"size": 20})]
        train, held_out = ([user(part.problem(index)) for index in range(len(part))] for part in parts)
        assert (len(train), len(held_out)) == (180, 20)
        assert {*train, *held_out} == names
        places = [int(text.split()[1]) for text in held_out]
        assert min(places) < 50 and max(places) >= 150
        again, other, plain = (open_source(source, options={"size": 20, **one}) for one in (
            {"shuffle_seed": 7}, {"shuffle_seed": 8}, {}))  # fmt: skip
        assert again.digest == parts[1].digest
        assert len({one.digest for one in (again, other, plain)}) == 3
        assert [user(other.problem(index)) for index in range(20)] != held_out


def test_digest_is_of_contents_columns_and_choice(tmp_path: Path) -> None:
    one = parquet(tmp_path / "one.parquet", prompts(3))
    same = parquet(tmp_path / "elsewhere" / "same.parquet", prompts(3))
    other = parquet(tmp_path / "other.parquet", prompts(4))
    digests = [open_source(source).digest for source in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 71
    changes = ({"system": "s"}, {"options": {"size": 2}}, {"options": {"keep": []}}, {"columns": {"answer": "prompt"}})
    assert len({digests[0], *(open_source(one, **change).digest for change in changes)}) == 5


@pytest.mark.slow
def test_a_million_rows_in_one_row_group_take_little_memory(tmp_path: Path) -> None:
    """Measured in a process of its own: 300,000 rows of 1 kB, which as one table are 300 MB."""
    text = pa.array([f"{number:06d}" + "x" * 1_000 for number in range(1_000)])
    table = pa.table({"prompt": pa.chunked_array([text] * 300)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=300_000, use_dictionary=False)
    code = (
        "import resource, sys; from tests.unit.data.test_tasksets_sources import open_source, user\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"taskset = open_source('parquet:{tmp_path}/x.parquet')\n"
        "assert user(taskset.problem(299_500)).startswith('000500xx')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[3])  # fmt: skip
    assert int(done.stdout) / 1024 < 100, "MB"


# --------------------------------------------------------------------------------------------- what is refused


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    source = parquet(tmp_path / "x.parquet", [{"question": "q", "extra_info": {"answer": "1", "index": 0}}])
    assert "none.parquet: no such file; expected a Parquet file" in refusal(f"parquet:{tmp_path}/none.parquet")
    assert "y-*.parquet: nothing matches" in refusal(f"parquet:{tmp_path}/y-*.parquet")
    (tmp_path / "empty").mkdir()
    assert "empty: no *.parquet there" in refusal(f"parquet:{tmp_path}/empty")
    assert "x.parquet: no column 'prompt'; found question, extra_info; did you mean 'question'?" in refusal(source)
    for mapped, text in [
        ({"prompt": "questoin"}, "no column 'questoin'; found question, extra_info; did you mean 'question'?; set"),
        ({"prompt": "question", "answer": "extra_info.anwser"},
         "row 0: no column 'extra_info.anwser'; found answer, index; did you mean 'answer'?"),
        ({"prompt": "question", "answer": "question.text"}, "no column 'question.text'; found a text"),
        ({"prompt": "question", "solution": "x"}, "columns.solution: unknown; known: answer, data_source"),
    ]:  # fmt: skip
        assert text in refusal(source, columns=mapped)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (5, "row 0: the prompt is a number, expected a text or a list of messages"),
        (True, "the prompt is a boolean"),
        ([], "the prompt is an empty list"),
        (["a"], "message 0 of the prompt, expected {role, content} as texts"),
        ([{"role": "user", "content": None}], "message 0 of the prompt, expected {role, content} as texts"),
        ([{"role": "user", "content": 3}], "message 0 of the prompt, expected {role, content} as texts"),
        ([{"role": "user", "content": [{"type": "image", "text": None}]}], "parts other than text"),
        ([{"role": "user", "content": "a", "name": 1}], "name is a number, expected a text"),
        ([{"role": "user", "content": "a", "tool_calls": [1]}], "tool_calls, expected a list of objects"),
        ({"role": "user", "content": "a"}, "the prompt is an object, expected a text or a list"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, prompt: Any, text: str) -> None:
    assert text in refusal(parquet(tmp_path / "x.parquet", [{"prompt": prompt}]))
    assert text.removeprefix("row 0: ") in refusal(write(tmp_path / "x.jsonl", {"prompt": prompt}))


def test_a_null_prompt_is_found_at_once_and_other_bad_rows_when_they_come(tmp_path: Path) -> None:
    rows = prompts(700)
    rows[600]["prompt"] = None
    said = (
        "x.parquet: row 600: the prompt is a null, expected a text or a list of messages; fill it, or leave the row out"
    )
    assert said in refusal(parquet(tmp_path / "x.parquet", rows))
    chats: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": "a"}]} for _ in range(5)]
    chats[3]["prompt"] = []
    taskset = open_source(parquet(tmp_path / "y.parquet", chats))
    with pytest.raises(ConfigError, match=r"y\.parquet: row 3: the prompt is an empty list"):
        taskset.problem(3)
    answers = open_source(parquet(tmp_path / "z.parquet", [{"prompt": "p", "answer": a} for a in ("#### 1", "2")]),
                          options={"answer_after": "####"})  # fmt: skip
    with pytest.raises(ConfigError, match=r"z\.parquet: row 1: the answer '2' has no '####'"):
        answers.problem(1)


def test_empty_and_broken_files_are_named(tmp_path: Path) -> None:
    schema = pa.schema([("prompt", pa.string())])
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    assert "has no rows" in refusal(f"parquet:{tmp_path}/empty.parquet")
    parquet(tmp_path / "good.parquet", prompts(2_000), compression="none")
    good = (tmp_path / "good.parquet").read_bytes()
    for name, data in {"nothing": b"", "text": b"no table\n" * 9, "cut": good[:-9], "head": good[100:]}.items():
        (tmp_path / f"{name}.parquet").write_bytes(data)
        assert f"{name}.parquet: cannot be read as a Parquet file" in refusal(f"parquet:{tmp_path}/{name}.parquet")
    pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "twice.parquet")
    assert "two columns have the same name" in refusal(f"parquet:{tmp_path}/twice.parquet")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_but_nothing_else(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    parquet(folder / "x.parquet", VERL * 5)
    contents = bytearray((folder / "x.parquet").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(4, len(contents) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.parquet").write_bytes(contents)
    try:
        taskset = open_source(f"parquet:{folder}/x.parquet", columns={"answer": "reward_model.ground_truth"})
        for index in range(len(taskset)):
            assert taskset.problem(index).messages
    except ConfigError as error:
        assert "x.parquet" in str(error)


def test_huge_and_deep_cells_are_refused_with_what_to_do(tmp_path: Path) -> None:
    source = parquet(tmp_path / "x.parquet", [{"prompt": "p", "trace": "é" * 3_000_000}])
    taskset = open_source(source)
    with pytest.raises(ConfigError, match=r"row 0: a problem of 6,000,0.. bytes, expected at most .* keep = "):
        taskset.problem(0)
    assert recordable(open_source(source, options={"keep": []}).problem(0)).info == {}
    deep: Any = 1
    for _ in range(30):
        deep = [deep]
    deeper = open_source(write(tmp_path / "x.jsonl", {"prompt": "p", "deep": deep}))
    with pytest.raises(ConfigError, match=r"x\.jsonl:1: more than 24 levels"):
        deeper.problem(0)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p", "numbers": [0] * 201}, r"numbers: got 201 items, expected at most 200; leave columns"),
        ({"prompt": "p", "tables": [[[]] * 90] * 6}, r"tables: got 1[01]\d\d items in all lists and maps"),
        ({"messages": [{"role": "user", "content": "p"}] * 201}, r"\$.messages: got 201 items, expected at most 200"),
    ],
    ids=["list", "lists", "messages"],
)
def test_a_row_of_too_many_items_is_named_when_its_file_is_opened(
    tmp_path: Path, form: str, row: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stands. A row of a Parquet file is named when it is read; and one item less is taken."""
    assert PROBLEM_LIMITS.items == LIMITS.items == 65_536
    monkeypatch.setattr(columns, "LIMITS", MessageLimits(items=200))
    total_items = 5000 if "messages" in row else 1000
    monkeypatch.setattr(columns, "PROBLEM_LIMITS", MessageLimits(items=200, total_items=total_items))
    name, value = list(row.items())[-1]
    rows = [{**row, name: value[:1]}] * 40

    def problems() -> list[Problem]:
        rows[33] = row
        path = tmp_path / f"x.{form}"
        if form == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        taskset = open_source(f"jsonl:{path}" if form == "jsonl" else parquet(path, rows))
        return [recordable(taskset.problem(index)) for index in range(40)]

    with pytest.raises(ConfigError, match=rf"x\.{form}(:34|: row 33): .*{said}"):
        problems()
    row = {**row, name: value[1:]}
    assert len(problems()) == 40


def test_a_file_that_is_written_to_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parquet(tmp_path / "x.parquet", prompts(3))
    states = iter([(1, 1), (2, 2)])
    monkeypatch.setattr(arrow, "_state", lambda path: next(states))
    assert "x.parquet: changed while it was read" in refusal(source)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parquet(tmp_path / "x.parquet", prompts(3))
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    assert "needs the package pyarrow" in refusal(source)
    assert pip_install("rftstream[data]") in refusal(source)


# --------------------------------------------------------------------------------------------- paths and values

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@given(row=st.dictionaries(st.text(max_size=5), VALUES, max_size=4), path=st.text(max_size=9))
def test_any_path_into_any_row_is_found_or_not(row: dict[str, Any], path: str) -> None:
    found, value, names = look_up(row, path)
    assert found or (value is None and isinstance(names, list))
    if path in row:
        assert (found, value) == (True, row[path])


@pytest.mark.slow
@settings(deadline=None)
@given(row=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_any_row_becomes_a_problem_that_a_record_holds_or_is_refused(row: dict[str, Any]) -> None:
    columns = Columns({}, system=None, config=TableConfig(), data_source="x")
    try:
        problem = columns.problem({**row, "prompt": "p"}, "x:1")
    except ConfigError as error:  # a column with one of our names and something else in it
        assert str(error).startswith("x:1: ")
    else:
        assert recordable(problem) == problem


@pytest.mark.parametrize("tools", [[None], False])
def test_tools_that_are_none_are_refused(tools: object) -> None:
    columns = Columns({}, system=None, config=TableConfig(), data_source="x")
    with pytest.raises(ConfigError, match=r"x:1: .*tool"):
        columns.problem({"tools": tools, "prompt": "p"}, "x:1")


def test_paths() -> None:
    row = {"a.b": 1, "a": {"b": 2, "c": [{"d": 3}]}, "n": None}
    assert look_up(row, "a.b") == (True, 1, ())  # a column of that very name
    assert look_up(row, "a.c.0.d") == (True, 3, ())
    assert look_up(row, "n.x.y") == (True, None, ())
    assert look_up(row, "a.c.1") == (False, None, ["a list of 1"])
    assert look_up(row, "a.x") == (False, None, ["b", "c"])
