"""The prompts for the model, and the parsing of its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rftstream.contracts.problems import ProblemKind, RejectReason
from rftstream.contracts.tasks import ChatMessage, Problem

PROMPTS: Mapping[str, str] = {
    ProblemKind.reworded: (
        "Write the problem below in other words. Keep every number and what is asked for, so that its answer stays the "
        'same.\n\nProblem:\n{problem}\n\nReply with JSON alone: {"problem": "..."}'
    ),
    ProblemKind.varied: (
        "Write another problem of the same kind as the one below, with other numbers or circumstances, and solve it."
        "\n\nProblem:\n{problem}\n\nIts answer:\n{answer}\n\nReply with JSON alone, with the answer in the same form: "
        '{"problem": "...", "answer": "..."}'
    ),
    ProblemKind.harder: (
        "Write a problem that is harder than the one below, but of the same kind, and solve it."
        "\n\nProblem:\n{problem}\n\nIts answer:\n{answer}\n\nReply with JSON alone, with the answer in the same form: "
        '{"problem": "...", "answer": "..."}'
    ),
}
"""Kind -> prompt for the model, used unless the run file has one. {problem} and {answer} are the parent's."""

FILLED = re.compile(r"\{(problem|answer)\}")


class RejectedAnswer(Exception):
    """The model's answer is not a valid problem."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def text_asked(problem: Problem) -> str:
    """Return the question of a problem: its last user message."""
    asked = [message.content for message in problem.messages if message.role == "user"]
    return asked[-1] if asked else ""


def request_for(kind: ProblemKind, parent: Problem, prompts: Mapping[str, str]) -> Problem:
    """Return the conversation that asks a model for a problem of this kind. `prompts` are the run file's own."""
    values = {"problem": text_asked(parent), "answer": parent.answer or ""}
    text = FILLED.sub(lambda found: values[found[1]], prompts.get(kind, PROMPTS[kind]))
    return Problem(messages=(ChatMessage(role="user", content=text),))


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads a problem from a model's answer. The step makes one with the run file's `pattern`."""

    pattern: re.Pattern[str] | None = None
    """A regular expression with the groups `problem` and optionally `answer`; None to read the last JSON object."""

    def read(self, said: str, kind: ProblemKind, parent: Problem) -> Problem:
        """Return the problem that the model made from the parent. RejectedAnswer for other answers."""
        found = self._found(said)
        text = found.get("problem")
        if not isinstance(text, str) or not text.strip():
            wanted = "JSON with a problem" if self.pattern is None else "what synthesiser.pattern matches"
            raise RejectedAnswer(RejectReason.unreadable, f"found no problem in the answer, expected {wanted}")
        if kind is ProblemKind.reworded:
            answer = parent.answer
        else:
            given = found.get("answer")
            answer = None if given is None or isinstance(given, dict | list) else str(given).strip()
        if not answer:
            raise RejectedAnswer(RejectReason.no_answer, "found a problem without an answer, expected one to check by")
        if _flat(text) == _flat(text_asked(parent)):
            raise RejectedAnswer(RejectReason.same_text, "found the parent's own words, expected other ones")
        return _made_of(parent, text.strip(), answer, keeps=kind is ProblemKind.reworded)

    def _found(self, said: str) -> Mapping[str, Any]:
        if self.pattern is None:
            return _last_object(said)
        match = self.pattern.search(said)
        return {} if match is None else match.groupdict()


def _made_of(parent: Problem, text: str, answer: str, *, keeps: bool) -> Problem:
    """Return the parent with another last user message. With `keeps` the parent's columns and images are kept, which is
    right only if the problem is the same in other words."""
    last = max(number for number, message in enumerate(parent.messages) if message.role == "user")
    changed = replace(parent.messages[last], content=text)
    messages = tuple(
        changed if number == last else message for number, message in enumerate(parent.messages[: last + 1])
    )
    return replace(parent, messages=messages, answer=answer, info=parent.info if keeps else {})


def _last_object(said: str) -> dict[str, Any]:
    """Return the last JSON object in a text that contains a problem; an empty one if there is none."""
    decoder, found, place = json.JSONDecoder(strict=False), {}, said.find("{")
    while place >= 0:
        end = place + 1
        try:
            value, end = decoder.raw_decode(said, place)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and "problem" in value:
            found = value
        place = said.find("{", end)
    return found


def _flat(text: str) -> str:
    return " ".join(text.casefold().split())
