"""The way from messages to token ids and back.

The ids are those of `AutoTokenizer.apply_chat_template`. A model with a `tokenizer.json` needs neither torch nor
transformers here."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.rollouts import AgentCall, ImageSpan, Segment, Turn
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.calls import tool_calls
from rftstream.models.calls.families import FamilyParser, open_parser
from rftstream.models.calls.written_turns import said_after
from rftstream.models.chat_template import ChatTemplate
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.folders import folder as model_folder
from rftstream.models.folders.files import read_json
from rftstream.models.folders.special_tokens import SPECIAL_NAMES
from rftstream.models.spec import ModelSpec
from rftstream.models.splice import Continuation, Conversation, Splicer
from rftstream.models.tokenizer import open_tokenizer
from rftstream.models.vision.image_tokens import ImageTokens, images_of, why_no_images

if TYPE_CHECKING:
    from rftstream.config.sections import EvaluationSection, TasksetSection

SHOWN_CHARACTERS = 8
"""Largest number of unknown characters that an error message shows."""
PROMPTS_KEPT = 128
"""Number of prompts whose ids are kept for siblings: an explorer receives the rollouts of several groups mixed."""
MAX_KEPT_CHARACTERS = 16384
"""Largest number of characters, over all messages, of a prompt that is kept. Its ids take several bytes per
character."""


Pieces = list[tuple[str, bool]]
"""Runs of text, each with whether it consists of special tokens, which `decode` leaves out."""


class Renderer(Protocol):
    """Turns messages into token ids and back. `open_renderer` makes it. Explorers, evaluators and readers of data call
    it, in any order."""

    @property
    def images(self) -> ImageTokens | None:
        """How images stand in prompts; None for a model that is not shown any."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end a completion."""

    @property
    def control_texts(self) -> frozenset[str]:
        """Texts that become special tokens wherever they appear in a message."""

    @property
    def context(self) -> int | None:
        """Largest number of tokens of prompt and completion together; None for no limit."""

    @property
    def vocabulary_size(self) -> int:
        """Number of ids; each id is below it."""

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of everything that the ids depend on."""

    @property
    def names(self) -> frozenset[str]:
        """Names that the template reads and does not set itself."""

    @property
    def dated(self) -> bool:
        """Whether a prompt rendered so far contains the date."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the ids of the prompt, up to the beginning of the assistant's turn, with all tokens of its images.
        ConfigError if the template refuses the messages, or if they have images and the model is not shown any."""

    def render_turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return prompt and completion for messages that end with an assistant's message.

        The prompt's ids are what `render` returns for the earlier messages. The completion's ids are those of the last
        message as the policy would have sampled it, with the token that ends the turn. `kwargs`: template values of
        these messages, in place of the model's."""

    def parse(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]],
        finish_reason: str,
        turn: int,
    ) -> AssistantMessage:
        """Return the sampled turn, split into text, reasoning and tool calls.

        `prompt`: the ids before it. `tools`: the tools that the prompt offers; without tools, no calls are looked for.
        `turn`: number of the turn, from 0, for the ids of calls. A call that cannot be read is returned as a call with
        an error; nothing raises."""

    def as_chat_message(self, said: AssistantMessage, completion: Sequence[int]) -> ChatMessage:
        """Return a message for later prompts from a message that `parse` returned.

        If the template shows tool calls and all of them could be read, they are in `tool_calls`. Otherwise the content
        is the text as it was sampled. Reasoning stands at the beginning of the content, between `<think>` and
        `</think>`. A template that reads reasoning from its own field gets it there."""

    def continue_prompt(
        self, known: Sequence[int], num_said: int, before: Conversation, now: Conversation
    ) -> Continuation:
        """Return the ids to append to `known` for the next turn, or the reason why a new segment has to begin.

        `known`: the tokens of the open segment; its last `num_said` tokens were sampled in the turn that just ended.
        `before`: the conversation from which that turn's prompt was rendered. `now`: the messages of `before`, the
        assistant's message (from `as_chat_message`), and the messages after it. ConfigError if the template or the
        tokenizer refuses `now`, as in `render`.

        The turn loop and the gateway call it once for each turn after the first. If they get a reason, they call
        `render`."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without a template. Names of special tokens in the text become these tokens.
        ConfigError if the tokenizer refuses the text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""

    def pieces(self, token_ids: Sequence[int]) -> Pieces:
        """Return the text of all tokens, for people to read, including the tokens that `decode` leaves out."""


def image_spans(renderer: Renderer, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[ImageSpan, ...]:
    """Return the spans of the messages' images in ids that the renderer returned for these messages."""
    return () if renderer.images is None else renderer.images.spans(token_ids, images_of(messages))


def pieces_of_turns(
    renderer: Renderer | None, turns: Sequence[Turn], segments: Sequence[Segment], calls: Sequence[AgentCall] = ()
) -> list[Pieces]:
    """Return the text of each turn. An assistant's turn is given as its sampled tokens. `calls` are those of an agent,
    whose segments may be in another order than its turns.

    Without a renderer, or if the segments lack a turn's tokens, a turn is given as its text, which has no special
    tokens."""
    sampled: list[int] = []
    for segment in segments if not calls else ():
        sampled += segment.token_ids.numpy()[segment.loss_mask.numpy().astype(bool)].tolist()
    for call in calls:
        if call.segment < len(segments):
            ids = segments[call.segment].token_ids.numpy()
            sampled += ids[call.start : call.start + call.count].tolist()
    found: list[Pieces] = []
    for turn in turns:
        own, sampled = sampled[: turn.num_tokens], sampled[turn.num_tokens :]
        is_there = renderer is not None and turn.num_tokens > 0 and len(own) == turn.num_tokens
        found.append(renderer.pieces(own) if renderer is not None and is_there else [(turn.content, False)])
    return found


def joined(pieces: Pieces) -> str:
    """Return the text of all pieces as one string."""
    return "".join(text for text, _ in pieces)


def is_light(spec: ModelSpec) -> bool:
    """Return whether the model's renderer opens quickly, without transformers."""
    return spec.name == model_folder.FAKE or (spec.folder / "tokenizer.json").is_file()


def open_renderer(spec: ModelSpec) -> Renderer:
    """Return the renderer of a model. ConfigError if its tokenizer or its template cannot be used."""
    return FakeRenderer(spec.context) if spec.name == model_folder.FAKE else HfRenderer(spec)


def own_renderers(
    spec: ModelSpec, sections: Mapping[str, TasksetSection] | Mapping[str, EvaluationSection]
) -> dict[str, Renderer]:
    """Return the renderers of those tasksets or evaluations that set their own template or template values."""
    specs = {name: model_folder.for_section(spec, section) for name, section in sections.items()}
    return {name: open_renderer(own) for name, own in specs.items() if own is not spec}


def open_parsers(renderers: Iterable[Renderer]) -> None:
    """Open the parsers of those renderers whose templates belong to a known family. Importing them takes seconds, for
    which the first completion would otherwise wait."""
    for renderer in renderers:
        if isinstance(renderer, HfRenderer):
            renderer.family  # noqa: B018  # it is kept


class HfRenderer:
    """The tokenizer of a Hugging Face model folder with the chat template in use, as `Renderer` describes it."""

    def __init__(self, spec: ModelSpec) -> None:
        templates = model_folder.chat_templates(spec)
        template = templates.get(model_folder.DEFAULT_TEMPLATE)
        if template is None:
            has = f"the chat templates {', '.join(templates)}, but no default" if templates else "no chat template"
            raise ConfigError(f"model: {spec.folder} has {has}; set model.chat_template to a Jinja file")
        for_tools = templates.get(model_folder.TOOLS_TEMPLATE)
        config = read_json(spec.folder / "config.json")
        wanted = {"eos_token", *(name for name in SPECIAL_NAMES if name in template + (for_tools or ""))}
        self._tokenizer = tokenizer = open_tokenizer(spec, wanted)
        special = tokenizer.named
        kwargs = dict(spec.chat_template_kwargs)
        self.images, self._folder = ImageTokens.of(spec.folder), spec.folder
        show = None if self.images is None else self._show
        self._template = ChatTemplate(
            template, model=spec.name, special=special, kwargs=kwargs, for_tools=for_tools, show=show
        )
        self._render_texts = functools.lru_cache(PROMPTS_KEPT)(self._render_now)
        self._ends_in_thought = functools.lru_cache(PROMPTS_KEPT)(
            lambda end: tool_calls.ends_in_thought(tokenizer.full_text(end))
        )
        self.names = self._template.names
        self._name = spec.name
        decoder = config.get("text_config", config)  # models that read more than text
        self.context = spec.context or decoder.get("max_position_embeddings")
        self.vocabulary_size = int(decoder.get("vocab_size") or tokenizer.size)
        eos = tokenizer.ids.get(special.get("eos_token", ""))
        self.stop_token_ids = _stop_token_ids(spec, config, eos)
        self._end = (eos,) if eos is not None else tuple(sorted(self.stop_token_ids)[:1])
        self.control_texts = frozenset() if tokenizer.is_split else frozenset(tokenizer.special.values())
        self._splicer = Splicer(self._template, tokenizer, self.stop_token_ids, encode=self.encode)
        given = [json.dumps(kwargs, sort_keys=True).encode()] if kwargs else []
        if self.images is not None:
            given.append(repr(self.images).encode())
        self.digest = _digest(
            tokenizer.identity,
            self._template.source.encode(),
            json.dumps(dict(special), sort_keys=True).encode(),
            json.dumps(sorted(self.stop_token_ids)).encode(),
            *given,
        )

    @property
    def dated(self) -> bool:
        return self._template.dated

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        if not (tools or self.images is not None or self.dated) and _is_first_prompt(messages):
            try:
                return self._render_texts(tuple(messages))  # siblings of a group ask for the same prompt
            except TypeError:  # a value in a message is not hashable
                pass
        return self._render_now(tuple(messages), tools)

    def _render_now(
        self, messages: tuple[ChatMessage, ...], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        self._refuse_images(messages)
        token_ids = self.encode(self._template.render(messages, tools))
        self._check_images(token_ids, messages)
        return token_ids

    def _refuse_images(self, messages: Sequence[ChatMessage]) -> None:
        """Raise ConfigError if there are images and the model is not shown any. Its template would write a wrong text
        for them."""
        if self.images is None and (shown := images_of(messages)):
            raise ConfigError(
                f"model {self._name}: got {len(shown)} images, which it is not shown: {why_no_images(self._folder)}"
            )

    def _show(self, text: str, messages: Sequence[ChatMessage]) -> str:
        """Return the rendered text with the text of each image in it. ConfigError if a message contains the marks of
        images."""
        assert self.images is not None
        try:
            return self.images.expand(
                text, images_of(messages), placeholder=self._tokenizer.full_text([self.images.token_id])
            )
        except ConfigError as error:
            raise ConfigError(f"model {self._name}: {error}") from None

    def _check_images(self, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> None:
        """Raise ConfigError unless the placeholders in the ids match the messages' images."""
        if self.images is not None:
            try:
                self.images.spans(token_ids, images_of(messages))
            except ConfigError as error:
                raise ConfigError(f"model {self._name}: {error}") from None

    def render_whole(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the ids of a finished conversation, as the template writes it. ConfigError if the template or the
        tokenizer refuses it."""
        return self.encode(self._template.render(messages, tools, add_generation_prompt=False))

    def render_turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self._refuse_images(messages)
        template = self._template.with_kwargs(kwargs) if kwargs else self._template
        before = template.render(messages[:-1], tools)
        try:
            ids = self.encode(said_after(before, template, messages, tools))
        except ConfigError as error:
            raise ConfigError(f"model {self._name}: {str(error).removeprefix(f'model {self._name}: ')}") from None
        ends = [place for place, token in enumerate(ids) if token in self.stop_token_ids]
        prompt = self.encode(before)
        self._check_images(prompt, messages[:-1])
        self._check_images(ids, ())
        return prompt, ids[: ends[0] + 1] if ends else (*ids, *self._end)

    def parse(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]],
        finish_reason: str,
        turn: int,
    ) -> AssistantMessage:
        ids_T = np.asarray(completion, dtype=np.int64)
        text = self._tokenizer.decode(ids := ids_T.tolist())
        form = self._template.call_form if tools else None
        on_lines = None if form is None else form.on_lines
        if self.family is not None:
            found = self.family.parse(
                prompt,
                ids,
                text=text,
                tools=tools,
                finish_reason=finish_reason,
                turn=turn,
                on_lines=on_lines,
            )
            if found is not None:
                return found
        num = len(ids) - (len(ids) > 0 and ids[-1] in self.stop_token_ids)
        left_out_T = self._tokenizer.left_out(ids_T)
        is_plain = not left_out_T[:num].any() and left_out_T[num:].all()
        return tool_calls.parse_text(
            text if is_plain else self._tokenizer.text_with(tool_calls.MARKS, ids_T[:num]),
            text=text,
            tools=tools,
            finish_reason=finish_reason,
            turn=turn,
            in_thought=self._ends_in_thought(tuple(prompt[-tool_calls.PROMPT_END :])),
            on_lines=on_lines,
        )

    @functools.cached_property
    def family(self) -> FamilyParser | None:
        """The parser for completions of the model's family; None if the family is unknown. `open_parsers` opens it
        early."""
        return open_parser(self._template.source, self._tokenizer)

    def as_chat_message(self, said: AssistantMessage, completion: Sequence[int]) -> ChatMessage:
        return tool_calls.chat_message(said, shows_calls=self._template.call_form is not None)

    def continue_prompt(
        self, known: Sequence[int], num_said: int, before: Conversation, now: Conversation
    ) -> Continuation:
        self._refuse_images(now.messages)
        found = self._splicer.continue_prompt(known, num_said, before, now)
        if found.break_reason is None:
            self._check_images(found.token_ids, now.messages[len(before.messages) + 1 :])
        return found

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer.encode(text))
        except Exception as error:  # the tokenizer's own error, which names no character
            raise ConfigError(f"model {self._name}: {self._why_not(text, error)}") from None

    def _why_not(self, text: str, error: Exception) -> str:
        unknown = []
        for name in self._tokenizer.added.values():
            text = text.replace(name, "")
        for character in dict.fromkeys(text):
            try:
                self._tokenizer.encode(character)
            except Exception:
                unknown.append(character)
        if not unknown:
            return f"the tokenizer refused a text: {error}"
        some = ", ".join(map(repr, unknown[:SHOWN_CHARACTERS])) + (", ..." if len(unknown) > SHOWN_CHARACTERS else "")
        return f"has no token for {some}; add what is missing to model.make.characters, or use another tokenizer"

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(token_ids, dtype=np.int64).tolist())

    def pieces(self, token_ids: Sequence[int]) -> Pieces:
        known = self._tokenizer
        return [
            ("".join(map(known.name_of, run)) if left_out else known.decode(run), left_out)
            for run, left_out in known.runs(token_ids)
        ]


def _is_first_prompt(messages: Sequence[ChatMessage]) -> bool:
    """Return whether siblings may ask for the prompt: it is short, has only texts, and nobody has answered yet."""
    are_texts = not any(message.media or message.tool_calls or message.role == "assistant" for message in messages)
    return are_texts and sum(len(message.content) for message in messages) <= MAX_KEPT_CHARACTERS


def _stop_token_ids(spec: ModelSpec, config: Mapping[str, Any], eos: int | None) -> frozenset[int]:
    """Return the ids in generation_config.json, or else those in config.json, and always the tokenizer's end of
    text."""
    said = read_json(spec.folder / "generation_config.json").get("eos_token_id")
    said = config.get("eos_token_id") if said is None else said
    ids = {*(said if isinstance(said, list) else [said]), eos} - {None}
    return frozenset(int(index) for index in ids)


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return f"sha256:{total.hexdigest()}"
