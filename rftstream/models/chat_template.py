"""A chat template in Jinja's sandbox, set up as transformers does it, and how it writes tool calls and reasoning.

Templates expect different forms of a message. Some want the arguments of a tool call as a map, others as JSON text.
Some want ids of nine letters, others accept any. Some read reasoning from its own field, others from the content. So
messages have one form here: arguments are a map, and reasoning is in the content between `<think>` and `</think>`.
`ChatTemplate` converts messages to the form that each template expects. It learns that form by rendering a small
conversation once.
"""

from __future__ import annotations

import copy
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.vision.images import IMAGE_MARK

if TYPE_CHECKING:
    import jinja2

GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that the renderer passes to every template. Settings may not use them."""
THINK, END_THINK = "<think>", "</think>"
_SHORT_ID_LENGTH = 9
"""Length of a call's id, in letters and digits, for templates that accept no other length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The form in which a template expects the tool calls of a message."""

    as_text: bool
    """Whether the arguments are JSON text; otherwise they are a map."""
    short_ids: bool
    """Whether ids must be nine letters and digits."""
    on_lines: bool = False
    """Whether a string argument is written on lines of its own; the line breaks around it are not part of the
    string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """One compiled template."""

    template: jinja2.Template
    names: frozenset[str]
    """Names that the template reads and does not set itself."""
    reasoning_field: str | None
    """Field of a message in which the template reads reasoning; None if it reads reasoning from the content, or not at
    all."""


class ChatTemplate:
    """A model's chat template, compiled. A renderer makes one and calls `render`."""

    def __init__(
        self,
        source: str,
        *,
        model: str,
        special: Mapping[str, str],
        kwargs: Mapping[str, Any],
        for_tools: str | None = None,
        show: Callable[[str, Sequence[ChatMessage]], str] | None = None,
    ) -> None:
        """`for_tools`: another template, for prompts with tools. `show`: replaces the marks of the messages' images in
        the rendered text with the text of each image."""
        self.source, self._show = source + (for_tools or ""), show
        self.dated = False
        """Whether a prompt rendered so far has the date in it."""
        self._model = model
        self._plain = _compile(source, where=f"model {model}: chat template", now=self._now)
        self._for_tools = self._plain
        if for_tools is not None:
            self._for_tools = _compile(for_tools, where=f"model {model}: chat template for tools", now=self._now)
        self.names = self._plain.names | self._for_tools.names
        """Names that the template reads and does not set itself."""
        self._values = {**special, **_checked(kwargs)}

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Return this template with other values for some names. ConfigError if a name is the renderer's own."""
        changed = copy.copy(self)
        changed._values = {**self._values, **_checked(kwargs)}
        return changed

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the conversation. ConfigError if the template refuses it."""
        form = self.call_form if any(message.tool_calls or message.tool_call_id for message in messages) else None
        text = self._render(messages, form, tools, add_generation_prompt)
        return text if self._show is None else self._show(text, messages)

    @functools.cached_property
    def call_form(self) -> CallForm | None:
        """The form of tool calls that the template expects; None if it does not show tool calls, or refuses them."""
        mark = "argument"
        schema = {"type": "object", "properties": {mark: {"type": "string"}}, "required": [mark]}
        tool = {"type": "function", "function": {"name": "probe", "description": "p", "parameters": schema}}
        for form in [CallForm(as_text=text, short_ids=short) for short in (False, True) for text in (False, True)]:
            call = {"id": "call_0_0", "type": "function", "function": {"name": "probe", "arguments": {mark: "marked"}}}
            chat = [
                ChatMessage(role="user", content="u"),
                ChatMessage(role="assistant", content="", tool_calls=(call,)),
                ChatMessage(role="tool", content="t", name="probe", tool_call_id="call_0_0"),
            ]
            try:
                text = self._render(chat, form, [tool], True)
            except ConfigError:
                continue
            if "marked" in text and "{'" not in text and '\\"marked' not in text:
                return replace(form, on_lines="\nmarked\n" in text)
        return None

    def _render(
        self, messages: Sequence[ChatMessage], form: CallForm | None, tools: Sequence[Mapping[str, Any]], prompt: bool
    ) -> str:
        chosen = self._for_tools if tools else self._plain
        given = [_map_of(message, form, chosen.reasoning_field) for message in messages]
        try:
            return chosen.template.render(
                messages=given,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=prompt,
                **self._values,
            )
        except Exception as error:  # the template is the user's code and may also add a text to a map
            raise ConfigError(f"model {self._model}: the chat template refused the messages: {error}") from None

    def _now(self, form: str) -> str:
        self.dated = True
        return datetime.datetime.now().strftime(form)


def _map_of(message: ChatMessage, form: CallForm | None, reasoning_field: str | None) -> dict[str, Any]:
    """Return the message as this template expects it: keys that do not apply are absent."""
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.media:
        values["content"] = _parts_of(message)
    if reasoning_field is not None and message.role == "assistant":
        reasoning, content = split_thinking(message.content)
        if reasoning:
            values |= {"content": content, reasoning_field: reasoning}
    if message.name is not None:
        values["name"] = message.name
    if message.tool_calls:
        values["tool_calls"] = [_call_for(call, form) for call in message.tool_calls]
    if message.tool_call_id is not None:
        values["tool_call_id"] = _id_for(message.tool_call_id, form)
    return values


def _parts_of(message: ChatMessage) -> list[dict[str, str]]:
    """Return texts and images as parts, in the form that templates of multimodal models expect. An image stands where
    its mark is in the text; without marks, images come first. ConfigError if the number of marks is not the number of
    images."""
    texts, count = message.content.split(IMAGE_MARK), len(message.media)
    if len(texts) == 1:
        texts = [*[""] * count, message.content]
    if len(texts) != count + 1:
        raise ConfigError(
            f"{len(texts) - 1} marks {IMAGE_MARK} in a message with {count} images, expected one for each"
        )
    parts: list[dict[str, str]] = []
    for place, text in enumerate(texts):
        parts += [{"type": "image"}] * (place > 0) + ([{"type": "text", "text": text}] if text else [])
    return parts


def split_thinking(content: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of the content, without its marks, and the rest. The reasoning is empty if
    the content does not begin with reasoning, or if the reasoning is not closed."""
    if not content.lstrip().startswith(THINK):
        return "", content
    reasoning, end, rest = content.lstrip()[len(THINK) :].partition(END_THINK)
    return (reasoning.strip("\n"), rest.lstrip("\n")) if end else ("", content)


def with_thinking(reasoning: str, content: str) -> str:
    """Return the content with its reasoning in front: the reverse of `split_thinking`."""
    return f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}" if reasoning else content


def _reasoning_field(source: str) -> str | None:
    """Return the field in which the template reads reasoning; None if it reads reasoning from the content, or not at
    all."""
    if END_THINK in source:
        return None
    if "reasoning_content" in source:
        return "reasoning_content"
    return "thinking" if re.search(r"\.thinking\b|\[.thinking.\]", source) else None


def _call_for(call: Mapping[str, Any], form: CallForm | None) -> dict[str, Any]:
    function = call.get("function")
    if form is None or not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments", {})
    if form.as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.as_text and isinstance(arguments, str):
        arguments = _map_in(arguments)
    values = {**call, "function": {**function, "arguments": arguments}}
    if "id" in call:
        values["id"] = _id_for(str(call["id"]), form)
    return values


def _map_in(text: str) -> Any:
    """Return the JSON object in a text; the text itself if it holds no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _id_for(call_id: str, form: CallForm | None) -> str:
    if form is None or not form.short_ids or (len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_LENGTH]


def _checked(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments. ConfigError if one of them may be passed by the renderer only."""
    for name in kwargs:
        if name in GIVEN:
            raise ConfigError(f"chat_template_kwargs.{name}: every template is given its own; remove it")
        if not name.isidentifier():
            raise ConfigError(f"chat_template_kwargs.{name}: expected a name that a template can use")
    return dict(kwargs)


def _compile(text: str, *, where: str, now: Callable[[str], str]) -> _Compiled:
    """Compile a template. ConfigError if it is not valid."""
    import jinja2.meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's part; here it stands for nothing."""

        tags = {"generation"}  # noqa: RUF012  as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(text))
        return _Compiled(
            template=environment.from_string(text), names=frozenset(names), reasoning_field=_reasoning_field(text)
        )
    except jinja2.TemplateError as error:
        raise ConfigError(f"{where}: {error}; mend the template") from None
