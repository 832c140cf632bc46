"""A version is asked as the run asks: with its system prompt, and up to its stop strings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rftstream.api.versions import RunVersion
from rftstream.config import loader
from rftstream.contracts.tasks import ChatMessage
from tests.suite.each import each


class Recorder:
    """A renderer and a model that keep what they are asked, and say "35.", then "no"."""

    stop_token_ids = frozenset({9})
    device = "cpu"

    def render(self, messages: list[ChatMessage]) -> list[int]:
        self.asked = [(one.role, one.content) for one in messages]
        return [1, 2]

    def decode(self, ids: list[int]) -> str:
        return "".join({3: "35", 4: ".", 5: "no"}[one] for one in ids)

    def generate(self, given: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.tensor([[*given[0].tolist(), 3, 4, 5, 9]])


def version(systems: list[str | None], stop: list[str]) -> tuple[RunVersion, Recorder]:
    own = [{} if one is None else {"system": one} for one in systems]
    config = loader.from_dict({
        "run": {"name": "x", "steps": 1}, "model": {"path": "fake"}, "sampling": {"stop": stop},
        "tasksets": {f"t{number}": {"source": "arithmetic", **more} for number, more in enumerate(own)},
    })  # fmt: skip
    made, recorder = RunVersion.__new__(RunVersion), Recorder()
    made.__dict__ |= {"_run": SimpleNamespace(config=config), "_loaded": (recorder, None), "_renderer": recorder}
    return made, recorder


USER = ("user", "7*5?")


@each(("systems", "prompt", "asked"), [
    (["Be short."], "7*5?", [("system", "Be short."), USER]),
    (["Be short."] * 2, "7*5?", [("system", "Be short."), USER]),
    (["Be short.", None], "7*5?", [USER]),
    ([None], "7*5?", [USER]),
    (["Be short."], [{"role": "user", "content": "7*5?"}], [USER]),
])  # fmt: skip
def test_a_text_gets_the_system_prompt_of_the_tasksets(systems: list[str | None], prompt: Any, asked: Any) -> None:
    made, recorder = version(systems, [])
    assert made.chat(prompt) == "35.no"
    assert recorder.asked == asked


@each(("stop", "answer"), [(["."], "35."), (["o", "5"], "35"), (["x"], "35.no")])
def test_an_answer_ends_after_the_first_stop_string(stop: list[str], answer: str) -> None:
    assert version([None], stop)[0].chat("7*5?") == answer
