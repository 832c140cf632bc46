"""docs/sandbox.md: its program runs and says what stands beside each line, and its run file scores an APPS row."""

from __future__ import annotations

import ast
import json
import tomllib
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.rewards.resolve import build_reward
from tests.docs.reading import ROOT, blocks
from tests.unit.reward_inputs import reward_input

PAGE = ROOT / "docs" / "sandbox.md"

pytestmark = pytest.mark.slow


def program_lines() -> tuple[str, list[tuple[str, str]]]:
    """Return the imports of the page's program, and each of its expressions with what the comment says."""
    (block,) = blocks(PAGE, "python")
    lines = block.text.splitlines()
    imports = [line for line in lines if line.startswith(("from ", "import "))]
    pairs = [tuple(line.rsplit("  # ", 1)) for line in lines if "  # " in line]
    return "\n".join(imports), [(pair[0], pair[1]) for pair in pairs]


IMPORTS, LINES = program_lines()


@pytest.mark.parametrize(("expression", "said"), LINES)
def test_each_line_gives_what_its_comment_says(expression: str, said: str) -> None:
    names: dict[str, Any] = {}
    exec(IMPORTS, names)  # our own page
    assert str(eval(expression, names)) == said


def test_no_line_is_left_out() -> None:
    (block,) = blocks(PAGE, "python")
    assert len(LINES) == sum(isinstance(one, ast.Expr) for one in ast.parse(block.text).body) > 0


def test_the_run_file_scores_a_row_of_apps() -> None:
    (block,) = (one for one in blocks(PAGE, "toml") if "[rewards.code]" in one.text)
    values = tomllib.loads(block.text)
    config = loader.from_dict({"run": {"name": "page", "steps": 1}, "model": {"path": "fake"}, **values})
    tests = {"inputs": ["1\n", "2\n", "-3\n"], "outputs": ["1\n", "4\n", "-9\n"]}
    answer = "```python\nnumber = int(input())\nprint(number * number)\n```"
    item = reward_input(answer, prompt="Square it.", info={"input_output": json.dumps(tests)})
    score = build_reward(config.tasksets["problems"].reward, config)(item)
    assert score.reward == pytest.approx(2 / 3)  # the share of the tests
