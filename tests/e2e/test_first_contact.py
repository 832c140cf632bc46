"""`init` -> `check` -> `run` in an empty folder, with nothing changed between them; and the wrong ways."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rftstream.preflight.first_file import run_file_text
from rftstream.preflight.first_problems import FirstFile
from tests.commands import call
from tests.e2e.workplace import COMMAND, LONG_S

ROWS = [{"text": f"{letter}{letter}>", "next": letter} for letter in "abcd"]


@pytest.mark.slow
def test_from_an_empty_folder_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RFTSTREAM")]:
        monkeypatch.delenv(name)
    assert call("init", "--steps", "3").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rftstream.toml", "problems.jsonl", "rftstream.schema.json"}
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    checked = call("check")
    assert checked.exit_code == 0, checked.output
    assert "ready to run" in checked.stdout
    done = subprocess.run([COMMAND, "run", "--json", "--progress", "none"], capture_output=True, text=True,
                          timeout=LONG_S, stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["version"] == 3
    final = Path(result["run_dir"]) / "final"
    assert {"config.json", "model.safetensors"} <= {path.name for path in final.iterdir()}
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    check_card(final, tmp_path)
    again = call("init")
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def check_card(final: Path, folder: Path) -> None:
    """The card has the last evaluation, which came after the trainer had left the model, and no path of the machine."""
    card = ModelCard.load(final / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"rftstream", "grpo"} <= set(card.data.tags)
    results = {result.metric_type: result for result in card.data.eval_results}
    assert {"mean", "pass@1", "pass@4"} <= set(results)
    assert results["mean"].dataset_name == "sums"
    assert "| `sums` | `jsonl:problems.jsonl` | 3 | 25 x 4 |" in card.text
    assert "| `sums` | `jsonl:problems.jsonl` | `exact` | `sha256:" in card.text
    assert str(folder) not in card.content
    code = card.text.partition("```python\n")[2].partition("```")[0]
    said: list[str] = []
    exec(code.replace("PATH-OR-NAME", str(final)).replace("PROMPT", "1+1="), {"print": said.append})
    assert len(said) == 1
    assert set(said[0]) <= set("0123456789+= "), "an answer of that model"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.delitem(sys.modules, "my_scores", raising=False)  # another test's
    (tmp_path / "my_scores.py").write_text(
        "def near(completion, answer):\n    return float(completion == answer)\ndef lost(completion, answr):\n    ...\n"
    )
    return tmp_path


def test_a_file_and_a_reward_of_ones_own(here: Path) -> None:
    done = call("init", "mine", "--tasks", "rows.jsonl", "--column", "prompt=text", "--column", "answer=next",
                "--reward", "my_scores:near", "--algorithm", "rloo", "--kafka", "broker:9092", "--name", "letters",
                "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    text = Path(written["run_file"]).read_text()
    for line in ('name = "letters"', 'algorithm = "rloo"', 'reward = "my_scores:near"', 'servers = "broker:9092"',
                 'characters = ">abcd"', "context = 5", "max_tokens = 2",
                 'source = "jsonl:../rows.jsonl"'):  # fmt: skip
        assert line in text
    made = sorted(path.name for path in (here / "mine").iterdir())
    assert made == ["my_scores.py", "rftstream.schema.json", "rftstream.toml"]
    assert [Path(one).name for one in written["copied"]] == ["my_scores.py"], "the run file works from any folder"
    assert call("init", "whole", "--tasks", here / "rows.jsonl", "--column", "prompt=text", "--column", "answer=next",
                "--reward", "my_scores:near").exit_code == 0  # fmt: skip
    assert f'source = "jsonl:{here}/rows.jsonl"' in (here / "whole" / "rftstream.toml").read_text(), "as it was given"


def test_what_is_not_given_is_asked_for(here: Path) -> None:
    done = call("init", "asked", "--ask", "--steps", "2", answer="\n\n\nexct\nexact\n\n\n")
    assert done.exit_code == 0, done.output
    assert "did you mean 'exact'?" in done.stderr
    text = (here / "asked" / "rftstream.toml").read_text()
    assert 'reward = "exact"' in text
    assert 'algorithm = "grpo"' in text
    assert "kafka" not in text
    assert call("check", "asked/rftstream.toml").exit_code == 0


GAME = """
from rftstream.contracts.tasks import ChatMessage
from rftstream.environments.base import Reply

class Game:
    def __init__(self, config, *, problem, seed):
        self.problem, self.turns = problem, 0

    def start(self):
        return self.problem.messages

    def reply(self, said):
        self.turns += 1
        right = said.content == self.problem.answer
        more = () if right else (ChatMessage(role="user", content="Try it again!"),)
        return Reply(done=right or self.turns == 3, messages=more, reward=float(right))

    def close(self):
        pass
"""


def test_an_environment_is_written_with_its_reward(here: Path) -> None:
    (here / "my_game.py").write_text(GAME)
    for named, written, reward in (("attempts", "attempts", "environment"), ("tools", "tools", "exact"),
                                   ("my_game:Game", "my_game:Game", "environment"),
                                   ("my_game.py:Game", "my_game:Game", "environment")):  # fmt: skip
        folder = here / re.sub(r"\W", "-", named)
        done = call("init", str(folder), "--environment", named)
        assert done.exit_code == 0, done.output
        config = tomllib.loads((folder / "rftstream.toml").read_text())
        for section in (config["tasksets"]["sums"], config["evaluations"]["sums"]):
            assert (section["environment"], section["reward"]) == (written, reward)
        assert call("check", str(folder / "rftstream.toml")).exit_code == 0
    assert (here / "my_game-Game" / "my_game.py").is_file(), "it runs from any folder"
    asked = call("init", "asked", "--ask", answer="\n\nmy_game.py:Game\n\n\n\nn\n")
    assert asked.exit_code == 0, asked.output
    assert 'environment = "my_game:Game"' in (here / "asked" / "rftstream.toml").read_text()


def test_the_reward_of_an_environment_needs_one(here: Path) -> None:
    done = call("init", "new", "--reward", "environment")
    assert done.exit_code == 2 and not (here / "new").exists()
    assert "none is named; name it, --environment attempts or --environment my_module.py:Class" in done.stderr
    lost = call("init", "new", "--environment", "attemts")
    assert lost.exit_code == 2 and "did you mean 'attempts'?" in lost.stderr


def test_each_answer_is_checked_when_it_is_given(here: Path) -> None:
    (here / "many.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}+1=", "next": str(n + 1)}) + "\n" for n in range(40))
    )
    answers = {
        "nowhere.jsonl": "no such file", "many.jsonl": "", "txt": "there are text, next", "text": "",
        "nxt": "there are next", "next": "",
        "./nomodel": "no such folder", "made": "", "attemts": "did you mean 'attempts'?", "": "",
        "no_such_module_here:score": "no module named", "my_scores:near": "",
        "0.9": "expected a number from 0 to 0.5", "0.25": "", "gpro": "did you mean 'grpo'?", "grpo": "",
        "broker": "expected host:port", "broker:9092": "", "n": "",
    }  # fmt: skip
    done = call("init", "asked", "--ask", answer="\n".join(answers) + "\n")
    assert done.exit_code == 0, done.output
    assert [said for said in answers.values() if said not in done.stderr] == []
    assert "try two problems" in done.stderr
    text = (here / "asked" / "rftstream.toml").read_text()
    for line in ('columns = { prompt = "text", answer = "next" }', "options = { shuffle_seed = 0, skip = 10 }",
                 "options = { shuffle_seed = 0, size = 10 }", 'reward = "my_scores:near"',
                 'servers = "broker:9092"'):  # fmt: skip
        assert line in text


def test_what_is_doubtful_of_the_problems_is_told(here: Path) -> None:
    rows = [{"prompt": f"{n % 20}+1=", "answer": "nan" if n % 2 else "1"} for n in range(40)]
    (here / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = call("init", "new", "--tasks", "twice.jsonl", "--held-out", "0.5", "--reward", "exact")
    found = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert len(found) == 2 and "rows have no answer" in found[0] and "so it is not held out" in found[1], done.output


def test_nothing_is_held_out_and_trained_on_where_problems_repeat(here: Path) -> None:
    rows = [{"prompt": f"{n % 35}+1=", "answer": "1"} for n in range(40)]
    (here / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = call("init", "new", "--tasks", "some.jsonl", "--held-out", "0.25", "--reward", "exact")
    assert done.exit_code == 0 and "warning" not in done.stdout, done.output
    assert "trained on, too" not in call("check", "new/rftstream.toml").stdout


def test_answers_are_not_lost_where_they_do_not_run(here: Path) -> None:
    done = call("init", "asked", "--ask", "--tasks", "rows.jsonl", answer="text\nnext\n\n\nmy_scores:lost\n\n\n")
    assert done.exit_code == 2 and not (here / "asked").exists()
    again = "rftstream init asked --tasks rows.jsonl --column prompt=text --column answer=next --reward my_scores:"
    assert f"answers: {again}lost\n" in done.stderr
    _, *arguments = shlex.split(f"{again}near")
    assert call(*arguments).exit_code == 0


def test_the_form_of_answers_and_the_device_are_written(here: Path) -> None:
    wanted = FirstFile(folder=here, model="a/model", answer_format="hashes", device="cuda:1", reward="exact")
    (here / "problems.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    config = tomllib.loads(run_file_text(wanted))
    assert config["tasksets"]["sums"]["system"] == "End with the final answer after ####."
    assert re.findall(config["rewards"]["exact"]["extract"], "so it is\n#### 42") == ["42"]
    assert (config["trainer"]["device"], config["explorer"]["devices"]) == ("cuda:1", ["cuda:1"])


def test_a_built_in_source(here: Path) -> None:
    assert call("init", "sums", "--tasks", "arithmetic").exit_code == 0
    assert call("check", "sums/rftstream.toml").exit_code == 0
    assert [path.name for path in (here / "sums").iterdir() if path.suffix == ".jsonl"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithm", "gpro"], "did you mean 'grpo'?"),
        (["--algorithm", "sft"], "nothing is written"),
        (["--reward", "exct"], "did you mean 'exact'?"),
        (["--reward", "no_such_module_here:score"], "no module named 'no_such_module_here'; is it installed"),
        (["--reward", "my_score:near"], "no module named 'my_score'; did you mean my_scores?"),
        (["--tasks", "many.jsonl", "--reward", "my_scores:lost"], "needs answr, but .* did you mean answer?"),
        (["--reward", "my_scores.py:near"], "a module has no ending: my_scores:near"),
        (["--tasks", "row.jsonl"], "no such file, and no source; .* did you mean rows.jsonl?"),
        (["--tasks", "my_scores.py"], "expected .jsonl, .csv or .parquet"),
        (["--tasks", "rows.jsonl"], "found the columns text, next"),
        (["--tasks", "rows.jsonl", "--column", "prompt"], "expected OURS=THEIRS"),
        (["--tasks", "rows.jsonl", "--column", "prompt=no_such"], "say which it is, --column prompt=NAME"),
        (["--tasks", "jsonl:rows.jsonl", "--model", "./nowhere", "--column", "prompt=text"], "no such folder"),
        (
            ["--tasks", "rows.jsonl", "--column", "prompt=text", "--reward", "my_scores:near"],
            "found the columns text, next, and none that is called like an answer, which my_scores:near takes; say "
            "which it is, --column answer=NAME",
        ),
        (
            ["--tasks", "rows.jsonl", "--column", "prompt=text", "--reward", "exact"],
            "the problem has no answer; say which column has it, --column answer=NAME. So it is with all",
        ),
        (["--name", "My Run"], "run.name"),
        (["--tasks", "squares"], "and images"),
        (["--tasks", "long.jsonl"], "too much for a small made model"),
        (["--tasks", "rows.jsonl", "--column", "question=text"], "--column question: unknown; known: answer, "),
        (["--tasks", "broken.jsonl"], "broken.jsonl:1: not JSON"),
        (["--tasks", "empty.jsonl"], "empty.jsonl: is empty, expected one JSON object a line"),
        (["--tasks", "latin.jsonl"], "latin.jsonl:1: not JSON: 'utf-8' codec"),
        (["--tasks", "list.json"], "list.json:1: found a list, .*; for a list, put the file alone into a folder"),
        (["--tasks", "table.csv"], "found the columns text, next"),
    ],
)
def test_wrong_answers_leave_nothing(arguments: list[str], said: str, here: Path) -> None:
    (here / "long.jsonl").write_text(json.dumps({"prompt": "x" * 2000, "answer": "y"}) + "\n")
    (here / "many.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 40)
    (here / "broken.jsonl").write_text("prompt,answer\n1,2\n")
    (here / "empty.jsonl").write_text("")
    (here / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "answer": "2"}\n')
    (here / "list.json").write_text('[{"prompt": "1+1=", "answer": "2"}]')
    (here / "table.csv").write_text("text,next\n1+1=,2\n")
    done = call("init", "new", *arguments)
    assert done.exit_code == 2, done.output
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), done.stderr), done.stderr
    assert done.stderr.count(".reward: ") <= 1, "not of the evaluation, too"
    assert not (here / "new").exists()


def test_a_folder_of_a_data_set_and_a_csv_file(here: Path) -> None:
    """Its columns are found as those of a file are."""
    (here / "set").mkdir()
    for suffix, mark in (("csv", ","), ("tsv", "\t")):
        rows = "".join(f"{n}+1={mark}{n + 1}\n" for n in range(9))
        (here / f"set.{suffix}").write_text(f"question{mark}answer\n{rows}")
    (here / "set" / "train.csv").write_text((here / "set.csv").read_text())
    for tasks, scheme in (("set", "hf"), ("set.csv", "csv"), ("set.tsv", "csv")):
        made = here / f"new-{tasks}"
        assert call("init", str(made), "--tasks", tasks, "--reward", "exact").exit_code == 0
        section = tomllib.loads((made / "rftstream.toml").read_text())["tasksets"]["set"]
        assert section["columns"] == {"prompt": "question"} and section["source"] == f"{scheme}:../{tasks}"


def test_a_folder_that_is_called_as_a_source_of_ones_own_is_not_it(here: Path) -> None:
    (here / "ArithmeticTaskset").mkdir()
    done = call("init", "--tasks", "rftstream.data.tasksets.arithmetic:ArithmeticTaskset", "--reward", "exact")
    assert done.exit_code == 0, done.stderr


def test_nothing_is_written_over(here: Path) -> None:
    (here / "problems.jsonl").write_text("{}\n")
    done = call("init")
    assert done.exit_code == 2
    assert "name it with --tasks problems.jsonl" in done.stderr
    assert (here / "problems.jsonl").read_text() == "{}\n"
    assert not (here / "rftstream.toml").exists()
