"""A model's renderer as `check` and `trial` use it: prompts with the text of each token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.errors import RftError
from rftstream.models.rendering import Renderer, joined, open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.images import IMAGE_MARK
from rftstream.preflight.checks.check_report import Prompt


@dataclass(frozen=True)
class Rendering:
    """A model's renderer, with the facts about its tokenizer that `check` needs. `of` makes it."""

    spec: ModelSpec
    renderer: Renderer
    context: int | None
    unknown: int | None = None
    """The token that stands for all unknown characters."""
    is_closed: bool = False
    """Whether some characters may have no token."""
    controls: re.Pattern[str] | None = None
    """Pattern that matches the names of special tokens in a text. None: there are no special tokens."""

    @staticmethod
    def of(spec: ModelSpec) -> Rendering:
        """Open the renderer of a model, and look at its tokenizer."""
        renderer = open_renderer(spec)
        unknown: int | None = None
        is_closed = False
        file = spec.folder / "tokenizer.json"
        if file.is_file():
            import tokenizers

            tokenizer = tokenizers.Tokenizer.from_file(str(file))
            if name := getattr(tokenizer.model, "unk_token", None):
                unknown = tokenizer.token_to_id(name)
            is_closed = unknown is not None or isinstance(tokenizer.model, tokenizers.models.WordLevel)
        context = spec.context if spec.context is not None else renderer.context
        names = sorted(renderer.control_texts - {"", IMAGE_MARK}, key=len, reverse=True)
        controls = re.compile("|".join(map(re.escape, names))) if names else None
        return Rendering(spec, renderer, context, unknown, is_closed, controls)

    def control_in(self, problem: Problem) -> str | None:
        """Return the first name of a special token in the problem's messages, or None."""
        found = (self.controls.search(message.content) for message in problem.messages) if self.controls else ()
        return next((one[0] for one in found if one is not None), None)

    def added(self, tools: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens that the template adds to a message without text, with these tools."""
        try:
            return len(self.renderer.render((ChatMessage(role="user", content=""),), tools))
        except RftError:  # the template refuses a message without text
            return 0

    def prompt(self, messages: tuple[ChatMessage, ...], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Render the messages as a prompt, with the text of each token."""
        token_ids = self.renderer.render(messages, tools)
        pieces = tuple(map(self.show, token_ids))
        return Prompt(messages=messages, token_ids=token_ids, pieces=pieces, text=self.text(token_ids))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as one text. A character may take several tokens."""
        return joined(self.renderer.pieces(token_ids))

    def show(self, token: int) -> str:
        """Return a token as text, or its id in angle brackets if it has no text."""
        return joined(self.renderer.pieces([token])) or f"<{token}>"
