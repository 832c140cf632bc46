"""The built-in tasksets: index i is the same problem everywhere, and what is wrong is named by file and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.loader import from_dict, load
from rftstream.config.sections import RunConfig
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input


def config_of(source: str, **section: Any) -> RunConfig:
    section = {"source": source, **section}
    return from_dict({"run": {"name": "test", "steps": 1}, "model": {"make": {}}, "tasksets": {"train": section}})


def open_source(source: str, **section: Any) -> Taskset:
    config = config_of(source, **section)
    return open_taskset("train", config.tasksets["train"], config)


def write(path: Path, *rows: Any) -> str:
    """Rows as JSON lines; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return f"jsonl:{path}"


def user(problem: Problem) -> str:
    assert problem.messages[-1].role == "user"
    return problem.messages[-1].content


# ------------------------------------------------------------------------------------------------------ jsonl


def test_jsonl(tmp_path: Path) -> None:
    source = write(
        tmp_path / "gsm.jsonl",
        {"question": "1+1?", "solution": "2", "level": 3, "nested": {"a": [1, None]}},
        "",
        {"question": "ümlaut?", "solution": 7},
        {"question": "none?", "solution": None},
    )
    taskset = open_source(source, columns={"prompt": "question", "answer": "solution"}, system="Be brief.")
    assert len(taskset) == 3
    assert taskset.problem(0) == Problem(
        messages=(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="1+1?")),
        answer="2",
        info={"level": 3, "nested": {"a": [1, None]}},
        data_source="gsm",
    )
    assert (user(taskset.problem(1)), taskset.problem(1).answer) == ("ümlaut?", "7")
    assert taskset.problem(2).answer is None
    assert taskset.problem(0) == taskset.problem(0)


@pytest.mark.parametrize(("name", "text"), [
    ("a.jsonl", '{"prompt": "ü"}\n{"prompt": "b"}\n'), ("a.jsonl", '\n{"prompt": "ü"}\n{"prompt": "b"}'),
    ("a.json", '[{"prompt": "ü"}, {"prompt": "b"}]'), ("a.json", '{"prompt": "ü"}\n{"prompt": "b"}\n'),
])  # fmt: skip
def test_a_byte_order_mark_is_not_of_the_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    source = f"jsonl:{tmp_path / name}" if name.endswith("l") else f"hf:{tmp_path}"
    (tmp_path / "run.toml").write_text(
        f"[run]\nname = 'n'\nsteps = 1\n[model.make]\n[tasksets.t]\nsource = '{source}'\n", encoding="utf-8-sig"
    )
    config = load([tmp_path / "run.toml"], env={})
    taskset = open_taskset("t", config.tasksets["t"], config)
    assert [user(taskset.problem(index)) for index in range(len(taskset))] == ["ü", "b"]


def test_nulls_that_somebody_wrote_stay(tmp_path: Path) -> None:
    arguments = {"a": None, "b": [None, {"c": None}]}
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments, "description": None}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}}
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    problem = open_source(write(tmp_path / "a.jsonl", {"messages": chat, "tools": [tool]})).problem(0)
    assert problem.messages[1].tool_calls == ({"type": "function", "function": {"name": "f", "arguments": arguments}},)
    assert problem.tools == (tool,)


def test_jsonl_chats(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = write(
        tmp_path / "a.jsonl",
        {"messages": chat, "data_source": "own", "prompt": "kept"},
        {"messages": chat[1:], "system": "row's"},
    )
    taskset = open_source(source, columns={"messages": "messages"}, system="section's")
    assert [message.content for message in taskset.problem(0).messages] == ["s", "u"]
    assert taskset.problem(0).data_source == "own"
    assert [message.content for message in taskset.problem(1).messages] == ["row's", "u"]
    by_prompt = open_source(write(tmp_path / "b.jsonl", {"prompt": chat}))
    assert [message.role for message in by_prompt.problem(0).messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("rows", "columns", "text"),
    [
        (['{"prompt": "a"}', '{"prompt": '], {}, "bad.jsonl:2: not JSON"),
        (['{"prompt": "a"}', "", "[1]"], {}, "bad.jsonl:3: found a list, expected an object"),
        (["null"], {}, "bad.jsonl:1: found a null, expected an object"),
        (
            ['{"question": "a", "b": 1}'],
            {},
            "bad.jsonl:1: no column 'prompt'; found question, b; did you mean 'question'",
        ),
        (['{"prompt": "a"}'], {"answer": "result"}, "bad.jsonl:1: no column 'result'; found prompt"),
        (['{"prompt": 5}'], {}, "bad.jsonl:1: the prompt is a number, expected a text or a list of messages"),
        (['{"prompt": []}'], {}, "bad.jsonl:1: the prompt is an empty list"),
        (['{"prompt": [{"role": "user"}]}'], {}, "bad.jsonl:1: message 0 of the prompt"),
        (['{"prompt": null}'], {}, "bad.jsonl:1: the prompt is a null"),
        (["[" * 100_000], {}, "bad.jsonl:1: not JSON"),
        ([""], {}, "bad.jsonl: is empty"),
        (['{"prompt": "a"}'], {"promt": "x"}, "columns.promt: unknown; .*did you mean 'prompt'"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, rows: list[str], columns: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"tasksets.train: .*{text}"):
        open_source(write(tmp_path / "bad.jsonl", *rows), columns=columns)


def test_jsonl_that_is_not_utf8_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1: not JSON"):
        open_source(f"jsonl:{tmp_path}/bad.jsonl")
    with pytest.raises(ConfigError, match=r"none\.jsonl: no such file"):
        open_source(f"jsonl:{tmp_path}/none.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        open_source(f"jsonl:{tmp_path}")


def test_jsonl_digest_is_of_contents_and_columns(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"prompt": "a", "q": "b"})
    same = write(tmp_path / "same.jsonl", {"prompt": "a", "q": "b"})
    other = write(tmp_path / "other.jsonl", {"prompt": "a", "q": "c"})
    digests = [open_source(source).digest for source in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].startswith("sha256:")
    assert len(digests[0]) == 71
    assert open_source(one, columns={"prompt": "q"}).digest != digests[0]
    assert open_source(one, system="s").digest != digests[0]


def test_jsonl_reads_by_offset(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number} " + "x" * (number % 50)} for number in range(2000)]
    taskset = open_source(write(tmp_path / "many.jsonl", *rows))
    for index in (1999, 0, 1000, 1):
        assert user(taskset.problem(index)) == rows[index]["prompt"]
    with pytest.raises(ConfigError, match="problem 2000, expected below 2000"):
        taskset.problem(2000)
    with open(tmp_path / "many.jsonl", "a") as file:
        file.write('{"prompt": "more"}\n')
    with pytest.raises(ConfigError, match=r"many\.jsonl: changed since the run began with it"):
        taskset.problem(0)


# ------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(("operation", "compute"), [("+", int.__add__), ("-", int.__sub__), ("*", int.__mul__)])
def test_arithmetic_has_every_problem_once(operation: str, compute: Any) -> None:
    taskset = open_source("arithmetic", options={"operation": operation, "low": 2, "high": 6})
    assert len(taskset) == 25
    seen = set()
    for index in range(25):
        problem = taskset.problem(index)
        prompt = user(problem)
        assert prompt.endswith("=")
        left, right = map(int, prompt[:-1].split(operation))
        assert problem.answer == str(compute(left, right))
        seen.add((left, right))
    assert seen == {(left, right) for left in range(2, 7) for right in range(2, 7)}


def test_arithmetic_options() -> None:
    options = {"terms": 3, "low": 10, "high": 99, "size": 50, "template": "What is {problem}?"}
    taskset = open_source("arithmetic", options=options, system="Compute.")
    assert len(taskset) == 50
    prompt = user(taskset.problem(7))
    assert prompt.startswith("What is ")
    assert taskset.problem(7).answer == str(sum(map(int, prompt[8:-1].split("+"))))
    assert taskset.problem(7).messages[0] == ChatMessage(role="system", content="Compute.")
    other_seed = open_source("arithmetic", options={**options, "seed": 1}, system="Compute.")
    assert [user(taskset.problem(i)) for i in range(50)] != [user(other_seed.problem(i)) for i in range(50)]
    assert taskset.digest != other_seed.digest


def test_arithmetic_skip_gives_disjoint_parts() -> None:
    train = open_source("arithmetic", options={"size": 80})
    held_out = open_source("arithmetic", options={"skip": 80})
    assert len(held_out) == 20
    train_prompts = {user(train.problem(i)) for i in range(80)}
    assert not train_prompts & {user(held_out.problem(i)) for i in range(20)}


def test_arithmetic_is_settled() -> None:
    """A resumed run goes on with the problems that it began with: these never change."""
    assert [user(open_source("arithmetic").problem(i)) for i in range(5)] == ["3+1=", "4+6=", "5+6=", "6+7=", "5+8="]


@each(
    ("source", "section", "text"),
    [
        ("arithmetic", {"options": {"low": 5, "high": 4}}, "high = 4, expected at least low = 5"),
        ("arithmetic", {"options": {"size": 101}}, r"skip \+ size = 101, but there are only 100 problems"),
        ("arithmetic", {"options": {"skip": 100}}, "there are only 100 problems"),
        ("arithmetic", {"options": {"template": "x"}}, "expected a text with {problem} in it"),
        ("arithmetic", {"options": {"hihg": 4}}, r"tasksets\.train\.options\.hihg: unknown key; .*did you mean 'high'"),
        ("arithmetic", {"options": {"operation": "/"}}, r"tasksets\.train\.options\.operation"),
        ("arithmetic", {"columns": {"prompt": "q"}}, "takes neither a location nor columns"),
        ("arithmetics", {}, r"tasksets\.train\.source: unknown 'arithmetics'; .*did you mean 'arithmetic'"),
        ("parqet:data/x", {}, r"tasksets\.train\.source: unknown 'parqet:data/x'; .*did you mean 'parquet'"),
        ("no_such_module:Class", {}, "no module named 'no_such_module'"),
    ],
)
def test_sources_that_are_wrong(source: str, section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_source(source, **section)


def test_a_taskset_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_taskset.py").write_text(
        "from dataclasses import dataclass\n"
        "from rftstream.contracts.tasks import ChatMessage, Problem\n"
        "class Own:\n"
        "    @dataclass(frozen=True, kw_only=True)\n"
        "    class Config:\n"
        "        size: int = 3\n"
        "    digest = 'sha256:0'\n"
        "    def __init__(self, config, *, location, columns, system): self._size = config.size\n"
        "    def __len__(self): return self._size\n"
        "    def problem(self, index): return Problem(messages=(ChatMessage(role='user', content=str(index)),))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    taskset = open_source("own_taskset:Own", options={"size": 5})
    assert (len(taskset), user(taskset.problem(4))) == (5, "4")
    with pytest.raises(ConfigError, match="has no problems"):
        open_source("own_taskset:Own", options={"size": 0})


# ---------------------------------------------------------------------------------------------- reasoning-gym


def reward_of(completion: str, problem: Problem, **settings: Any) -> float:
    from rftstream.rewards.reasoning_gym import ReasoningGymReward

    reward = ReasoningGymReward(ReasoningGymReward.Config(**settings))
    item = reward_input(
        completion, problem.answer, prompt="", data_source=problem.data_source,
        info=json.loads(json.dumps(problem.info)),
    )  # fmt: skip
    return reward(item).reward


@pytest.fixture(scope="module")
def _reasoning_gym() -> None:
    from rftstream.data.tasksets.reasoning_gym import import_reasoning_gym

    import_reasoning_gym()


@pytest.mark.slow
@pytest.mark.usefixtures("_reasoning_gym")
@pytest.mark.parametrize("name", ["chain_sum", "knights_knaves", "rearc", "word_ladder", "countdown", "graph_color"])
def test_reasoning_gym_problems_survive_the_wire_and_are_scored(name: str) -> None:
    import reasoning_gym

    taskset = open_source(f"reasoning_gym:{name}", options={"size": 20, "seed": 3}, system="Think.")
    assert len(taskset) == 20
    problem = taskset.problem(2)
    assert problem.messages[0].content == "Think."
    assert problem.data_source == f"reasoning_gym/{name}"
    dataset = reasoning_gym.create_dataset(name, size=20, seed=3)
    if name == "graph_color":
        assert reward_of("{}", problem) == dataset.score_answer("{}", dataset[2])
        return
    assert problem.answer
    assert reward_of(problem.answer, problem) == pytest.approx(1.0)
    assert reward_of("no idea at all", problem) == dataset.score_answer("no idea at all", dataset[2]) < 1.0


@pytest.mark.usefixtures("_reasoning_gym")
def test_reasoning_gym_takes_the_tagged_answer() -> None:
    problem = open_source("reasoning_gym:chain_sum", options={"config": {"min_terms": 2, "max_terms": 2}}).problem(0)
    right = problem.answer or ""
    assert user(problem).count("+") + user(problem).count("-") == 1
    assert reward_of(f"<answer>1</answer> no: <answer>\n{right} </answer>.", problem) == 1.0
    assert reward_of(f"<answer>{right}</answer> no: <answer>x</answer>", problem) < 1.0
    assert reward_of(right, problem, require_tag=True) == 0.0
    assert reward_of(f"<a>{right}</a>", problem, tag="a") == 1.0
    assert reward_of(f" {right} ", problem, tag=None) == 1.0


@pytest.mark.usefixtures("_reasoning_gym")
def test_reasoning_gym_digest_and_errors() -> None:
    plain = open_source("reasoning_gym:chain_sum")
    assert plain.digest == open_source("reasoning_gym:chain_sum").digest
    assert plain.digest != open_source("reasoning_gym:chain_sum", options={"seed": 1}).digest
    for section, text in [
        ({"source": "reasoning_gym:chain_sums"}, "unknown task; .*did you mean 'chain_sum'"),
        ({"options": {"config": {"min_term": 2}}}, r"config\.min_term: unknown key; .*did you mean 'min_terms'"),
        ({"options": {"config": {"min_terms": 0}}}, "config refused"),
        ({"columns": {"prompt": "q"}}, "has no columns"),
    ]:
        with pytest.raises(ConfigError, match=f"reasoning_gym:chain_sums?: {text}"):
            open_source(**{"source": "reasoning_gym:chain_sum", **section})


def describe(*sources: str) -> str:
    tasksets = [open_source(source) for source in sources]
    return repr([(taskset.digest, taskset.problem(5), taskset.problem(3)) for taskset in tasksets])


@pytest.mark.slow
@pytest.mark.usefixtures("_reasoning_gym")
def test_problems_are_the_same_in_every_process() -> None:
    sources = ("arithmetic", "reasoning_gym:chain_sum", "reasoning_gym:countdown")
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from test_tasksets_sources import describe; print(describe(*{sources!r}))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, check=True)
    assert done.stdout.decode().strip() == describe(*sources)
