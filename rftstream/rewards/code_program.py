"""Finds the program in an answer: the last fenced block in the required language."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.errors import ConfigError
from rftstream.rewards.answers.thoughts import after_thoughts
from rftstream.rewards.code_tests import CheckTests, FunctionTests, ProblemTests
from rftstream.sandbox.languages import language_name

_FENCE = re.compile(r"(`{3,}+(?=[^`]*$)|~{3,}+)", re.DOTALL)
_BROKEN = re.compile(r"^\s*(?:(?:def|class|for|while|if|with|try)\b.*:\s*$|(?:import|from)\s+\w)", re.MULTILINE)
"""A line of a program that Python cannot parse as a whole."""
_TAG = re.compile(r"[\s{.]*([A-Za-z+#]+\d*)")


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """A fenced block: the text after its opening fence, and its content."""

    tag: str
    text: str


def find_program(completion: str, tests: ProblemTests, language: str = "python") -> str | None:
    """Return the program in an answer: its last fenced block in the language, or the whole answer if there is none.
    None if the program is empty.

    A block in another language counts only if there is no other. A block without a language counts if it reads like a
    program, since sample output is also in such blocks. If tests are for a function, a block that defines the function
    is preferred. If no block does, the answer may continue the prompt, as HumanEval's completions do.
    """
    completion = after_thoughts(completion)
    blocks = _blocks(completion)
    name = (
        tests.function
        if isinstance(tests, FunctionTests)
        else tests.entry_point
        if isinstance(tests, CheckTests)
        else ""
    )
    source = _chosen(blocks, name, language).text if blocks else completion
    if not source.strip():
        return None
    if isinstance(tests, CheckTests) and tests.stub and not _defines(source, name):
        return tests.stub + source
    return source


def _chosen(blocks: Sequence[FencedBlock], name: str, language: str) -> FencedBlock:
    wanted = [block for block in blocks if _is_wanted(block, language)]
    untagged = [block for block in blocks if not block.tag]
    for some in ([block for block in wanted if name and _defines(block.text, name)], wanted, untagged):
        if some:
            return some[-1]
    return blocks[-1]


def _is_wanted(block: FencedBlock, language: str) -> bool:
    if not block.tag:
        return _reads_like_program(block.text, language)
    try:
        return language_name(block.tag) == language
    except ConfigError:
        return False


def _reads_like_program(text: str, language: str) -> bool:
    """Return whether a block without a language is a program, not a program's output."""
    if language != "python":
        return bool(re.search(r"[;{}]", text)) or language == "bash"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _BROKEN.search(text) is not None
    return any(not isinstance(one, ast.Expr) or isinstance(one.value, ast.Call) for one in tree.body)


def _defines(source: str, name: str) -> bool:
    name = re.escape(name.rpartition(".")[2])
    return bool(re.search(rf"\b(def|class)\s+{name}\b|^\s*{name}\s*(?::[^=\n]+)?=", source, re.MULTILINE))


def _blocks(text: str) -> list[FencedBlock]:
    """Return the fenced blocks, in linear time for any text: each fence is searched for once, and an unclosed one is
    text."""
    lines = text.split("\n")
    last_with = {line.strip(): number for number, line in enumerate(lines)}
    found, number = list[FencedBlock](), 0
    while number < len(lines):
        line = lines[number].strip()
        fence = _FENCE.match(line)
        if fence is not None and last_with.get(fence[1], -1) > number:
            begin = number = number + 1
            while lines[number].strip() != fence[1]:
                number += 1
            tag = _TAG.match(line, fence.end())
            text_of_it = "".join(f"{line}\n" for line in lines[begin:number])
            found.append(FencedBlock(tag[1].lower() if tag else "", text_of_it))
        number += 1
    return found
