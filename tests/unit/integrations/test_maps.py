"""Functions over rows that are drawn at random: the converted run file gives the problems that they make."""

from __future__ import annotations

import json
import os
import random
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.data.tasksets.open import open_taskset
from rftstream.integrations.foreign_configs import convert_config
from tests.suite.sampling import SEED
from tests.unit.integrations.test_foreign_configs import written

IMPORTS = "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"
SCRIPT = """
SYSTEM = "Be short."
TEMPLATE = "Solve: {q} now"
FEW = [{"role": "system", "content": "Few."}]
FLAG = True

def right(completions, answer, **kwargs):
    return [float(one in said[0]["content"]) for said, one in zip(completions, answer)]

def cut(text):
    return text.split("####")[-1].strip()

def wrapped(text, left="<", right=">"):
    return left + text + right

def note(row):
    row["q"] = row["q"] + "~"
    return row

MADE
data = load_dataset("json", data_files="rows.jsonl", split="train")BEFORE.map(made)
"""
TRAINED = 'GRPOTrainer("m", right, GRPOConfig("o"), data).train()\n'
ROWS = [
    {"q": f"q{k} {'x' * k}", "a": f"work {k} #### {k * 7}", "w": f"word{k}", "n": {"deep": f"d{k}"}} for k in (1, 5)
]
TEXTS = ['row["q"]', 'row["w"]', 'row["n"]["deep"]', 'row.get("q")', "q"]
ANSWERS = ['row["a"]', 'cut(row["a"])', 'row["a"].split("####")[1].strip()', '"7"', "ans", 'row["a"].replace("7", "8")']
BEFORE = ["", "", ".map(note)", ".map(lambda row: {'q': row['q'] + '?'})", ".map(lambda row: {'w': row['w'].upper()})",
          ".rename_column('w', 'v').rename_column('q', 'w').rename_column('v', 'q')"]  # fmt: skip


class Rows:
    """What a script needs of a dataset."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def map(self, function: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Rows:
        """As datasets has it: a row with what the function changes in it, and returns."""
        copies = [json.loads(json.dumps(row)) for row in self.rows]
        made = [function(row) for row in copies]
        return Rows([{**row, **one} for row, one in zip(copies, made, strict=True)])

    def rename_column(self, old: str, new: str) -> Rows:
        return Rows([{new if name == old else name: value for name, value in row.items()} for row in self.rows])


def text(rng: random.Random, depth: int = 0) -> str:
    """A text of a row."""
    simple = rng.choice(TEXTS)
    if depth > 2:
        return simple
    more = [
        lambda: simple, lambda: f"{text(rng, depth + 1)} + {rng.choice(['repr(3)', repr(' {q} '), 'SYSTEM', simple])}",
        lambda: f"TEMPLATE.format(q={text(rng, depth + 1)})", lambda: f"wrapped({text(rng, depth + 1)}, right=']')",
        lambda: f"({text(rng, depth + 1)}).upper()", lambda: f"({simple} if FLAG else 'no')", lambda: f"str({simple})",
        lambda: f"f\"Do {{{simple.replace(chr(34), chr(39))}}} {{{{}}}}\"",
    ]  # fmt: skip
    return rng.choice(more)()


def statement(rng: random.Random) -> str:
    """A statement of a function over rows."""
    return rng.choice([
        lambda: f"q = {text(rng)}", lambda: f'row["q"] = {text(rng)}', lambda: f"row = {{**row, 'q': {text(rng)}}}",
        lambda: f"if {rng.choice(['FLAG', 'not FLAG', 'len(q) > 4'])}:\n{textwrap.indent(statement(rng), '    ')}",
        lambda: 'for k in range(2):\n    row["q"] = row["q"] + str(k)', lambda: "note(row)", lambda: "row = note(row)",
        lambda: 'row.update({"w": "changed"})', lambda: f"ans = {rng.choice(ANSWERS)}", lambda: "q += '.'",
        lambda: 'other = row\nother["q"] = "alias"', lambda: "said.append({'role': 'user', 'content': q})",
        lambda: f"try:\n    q = row['zz']\nexcept KeyError:\n    q = {text(rng)}", lambda: "q, ans = ans, q",
    ])()  # fmt: skip


def function(rng: random.Random) -> str:
    """A function that makes a prompt and an answer of a row."""
    asked = f"{{'role': 'user', 'content': {text(rng)}}}"
    chats = [f"[{asked}]", f"[{{'role': 'system', 'content': SYSTEM}}, {asked}]", f"FEW + [{asked}]",
             f"said + [{asked}]", f"[{asked}, {asked}]", f"[dict(role='user', content={text(rng)})]"]  # fmt: skip
    chat, answer = rng.choice(chats), rng.choice(ANSWERS)
    ends = [
        f"return {{'prompt': {chat}, 'answer': {answer}}}",
        f"return {{**row, 'prompt': {chat}, 'answer': {answer}}}",
        f"row['prompt'] = {chat}\nrow['answer'] = {answer}\nreturn row",
    ]
    body = ['q, ans = row["q"], row["a"]', "said = []", *(statement(rng) for _ in range(rng.randint(0, 3)))]
    return "def made(row):\n" + textwrap.indent("\n".join([*body, rng.choice(ends)]), "    ")


def test_what_is_taken_of_a_map_is_what_it_makes(tmp_path: Path) -> None:
    seed = os.environ[SEED]
    rng = random.Random(seed)
    taken = 0
    for number in range(60):
        made = SCRIPT.replace("MADE", function(rng)).replace("BEFORE", rng.choice(BEFORE))
        folder = tmp_path / str(number)
        files = {"train.py": IMPORTS + made + TRAINED, "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS)}
        folder.mkdir()
        done = convert_config("trl", written(folder, files)[:1])
        space: dict[str, Any] = {"load_dataset": lambda *_, **__: Rows(ROWS)}
        try:
            exec(made, space)
        except (KeyError, AttributeError, TypeError, NameError):  # a function that no row survives
            continue
        if "train_rows.jsonl" in done.run_file:
            continue
        taken += 1
        written(folder, {"run.toml": done.run_file})
        config = loader.load([folder / "run.toml"], env={})
        taskset = open_taskset("train", config.tasksets["train"], config)
        for index, row in enumerate(space["data"].rows):
            problem = taskset.problem(index)
            said = [{"role": one.role, "content": one.content} for one in problem.messages]
            answer = (problem.answer or "").strip()
            assert (said, answer) == (row["prompt"], row["answer"].strip()), f"seed {seed}:\n{made}"
    assert taken, f"seed {seed}"
