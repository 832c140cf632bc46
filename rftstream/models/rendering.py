"""The way from messages to token ids and back. Needs neither torch nor transformers where the model has a
`tokenizer.json`.

The chat template runs in Jinja's sandbox, set up as transformers does it, so that the ids are those of
`AutoTokenizer.apply_chat_template`."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.contracts.rollouts import Segment, Turn
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models import folder as model_folder
from rftstream.models.files import read_json
from rftstream.models.spec import ModelSpec

if TYPE_CHECKING:
    import jinja2

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that the renderer gives to every template, so that no setting may."""
SHOWN_CHARACTERS = 8
"""Largest number of characters without a token that an error shows."""


Pieces = list[tuple[str, bool]]
"""Runs of text, each with whether it is special tokens, which `decode` leaves out."""


class Renderer(Protocol):
    """Turns messages into token ids and back. `open_renderer` makes it; explorers, evaluators and readers of data
    call it, in any order."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end a completion; any of them does."""

    @property
    def context(self) -> int | None:
        """Largest number of tokens of prompt and completion together; None for no limit."""

    @property
    def vocabulary_size(self) -> int:
        """Number of ids; each id lies below it."""

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of all that the ids depend on."""

    @property
    def names(self) -> frozenset[str]:
        """Names that the template reads and does not set itself."""

    @property
    def dated(self) -> bool:
        """Whether a prompt rendered so far has the date in it."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the ids of the prompt, up to where the assistant's turn begins. ConfigError if the template refuses
        the messages."""

    def render_turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return prompt and completion of messages that end with one of the assistant's.

        The prompt's ids are those that `render` gives for the messages before. The completion's are those of the
        last message as if the policy had said it, with the token that ends it."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text as it is; names of special tokens in it become these tokens. ConfigError if the
        tokenizer refuses it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""

    def pieces(self, token_ids: Sequence[int]) -> Pieces:
        """Return the text of all tokens, for people to read, with those that `decode` leaves out."""


def pieces_of_turns(renderer: Renderer | None, turns: Sequence[Turn], segments: Sequence[Segment]) -> list[Pieces]:
    """Return what each turn says. An assistant's turn is given as its sampled tokens.

    Without a renderer, or where the segments lack a turn's tokens, a turn is given as its text, which has no special
    tokens."""
    sampled: list[int] = []
    for segment in segments:
        sampled += segment.token_ids.numpy()[segment.loss_mask.numpy().astype(bool)].tolist()
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
    """Return whether the model's renderer opens in a moment, without transformers."""
    return spec.name == model_folder.FAKE or (spec.folder / "tokenizer.json").is_file()


def open_renderer(spec: ModelSpec) -> Renderer:
    """Return the renderer of a model. ConfigError if its tokenizer or its template cannot be used."""
    return FakeRenderer(spec.context) if spec.name == model_folder.FAKE else HfRenderer(spec)


class HfRenderer:
    """The tokenizer of a Hugging Face model folder with the chat template in effect, as `Renderer` describes it."""

    def __init__(self, spec: ModelSpec) -> None:
        template = model_folder.chat_template_text(spec)
        if template is None:
            raise ConfigError(f"model: {spec.folder} has no chat template; set model.chat_template to a Jinja file")
        settings = read_json(spec.folder / "tokenizer_config.json")
        config = read_json(spec.folder / "config.json")
        fast = (spec.folder / "tokenizer.json").is_file()
        self._tokenizer = tokenizer = _fast_tokenizer(spec, settings) if fast else _auto_tokenizer(spec)
        self._special = {name: text for name in SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
        self.dated = False
        self._template, self.names = _compile(template, where=f"model {spec.name}: chat template", now=self._now)
        self._kwargs = _checked(spec.chat_template_kwargs)
        self._name = spec.name
        self.context = spec.context or config.get("max_position_embeddings")
        self.vocabulary_size = int(config.get("vocab_size") or tokenizer.size)
        eos = tokenizer.ids.get(self._special.get("eos_token", ""))
        self.stop_token_ids = _stop_token_ids(spec, config, eos)
        self._end = (eos,) if eos is not None else tuple(sorted(self.stop_token_ids)[:1])
        given = [json.dumps(self._kwargs, sort_keys=True).encode()] if self._kwargs else []
        self.digest = _digest(
            tokenizer.identity,
            template.encode(),
            json.dumps(self._special, sort_keys=True).encode(),
            json.dumps(sorted(self.stop_token_ids)).encode(),
            *given,
        )

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return self.encode(self._text(messages, tools))

    def render_turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        before, said = self._text(messages[:-1], tools), messages[-1].content
        whole = self._text(messages, tools, add_generation_prompt=False)
        if whole.startswith(before):
            said = whole[len(before) :]
        elif messages[-1].tool_calls:
            raise ConfigError(
                f"model {self._name}: the chat template writes a message with tool calls otherwise than after its own "
                "prompt, expected the same beginning; give another model.chat_template"
            )
        ids = self.encode(said)
        ends = [place for place, token in enumerate(ids) if token in self.stop_token_ids]
        return self.encode(before), ids[: ends[0] + 1] if ends else (*ids, *self._end)

    def _text(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=[_message(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **self._kwargs},
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"model {self._name}: the chat template refused the messages: {error}") from None

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer.encode(text))
        except Exception as error:  # the tokenizer's own, which names no character
            raise ConfigError(f"model {self._name}: {self._why_not(text, error)}") from None

    def _why_not(self, text: str, error: Exception) -> str:
        unknown = []
        for character in dict.fromkeys(text):
            try:
                self._tokenizer.encode(character)
            except Exception:
                unknown.append(character)
        if not unknown:
            return f"the tokenizer refused a text: {error}"
        some = ", ".join(map(repr, unknown[:SHOWN_CHARACTERS])) + (", ..." if len(unknown) > SHOWN_CHARACTERS else "")
        return f"has no token for {some}; add what is missing to model.make.characters, or use another tokenizer"

    def _now(self, form: str) -> str:
        self.dated = True
        return datetime.datetime.now().strftime(form)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in token_ids])

    def pieces(self, token_ids: Sequence[int]) -> Pieces:
        known = self._tokenizer

        def is_left_out(token: int) -> bool:
            return token in known.special or token >= known.size

        def text(run: list[int], *, left_out: bool) -> str:
            return "".join(known.special.get(token, f"<{token}>") for token in run) if left_out else known.decode(run)

        runs = groupby(map(int, token_ids), key=is_left_out)
        return [(text(list(run), left_out=left_out), left_out) for left_out, run in runs]


class FakeRenderer:
    """A renderer without a model, as `Renderer` describes it. Ids are the bytes of UTF-8; id 0 ends a completion."""

    vocabulary_size = 256
    stop_token_ids = frozenset({0})
    digest = "sha256:" + hashlib.sha256(b"rftstream FakeRenderer 1").hexdigest()
    names: frozenset[str] = frozenset()
    dated = False

    def __init__(self, context: int | None = None) -> None:
        self.context = context

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return self.encode("\n".join(message.content for message in messages))

    def render_turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.render(messages[:-1], tools), (*self.encode(messages[-1].content), 0)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(int(token) for token in token_ids if token).decode(errors="replace")

    def pieces(self, token_ids: Sequence[int]) -> Pieces:
        runs = [(left_out, list(run)) for left_out, run in groupby(token_ids, key=lambda token: not token)]
        return [("<end>" * len(run) if left_out else self.decode(run), left_out) for left_out, run in runs]


def _message(message: ChatMessage) -> dict[str, Any]:
    """Return the message as templates expect it: keys that do not apply are absent."""
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        values["name"] = message.name
    if message.tool_calls:
        values["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokenizer:
    """A tokenizer, whichever library it is from."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    """Return the text without special tokens."""
    ids: Mapping[str, int]
    """Text -> id, at least of the tokens that have a name."""
    special: Mapping[int, str]
    """Id -> text of the tokens that `decode` leaves out."""
    size: int
    identity: bytes
    """Bytes that stand for the whole tokenizer in digests."""


def _fast_tokenizer(spec: ModelSpec, settings: Mapping[str, Any]) -> _Tokenizer:
    import tokenizers

    data = (spec.folder / "tokenizer.json").read_bytes()
    tokenizer = tokenizers.Tokenizer.from_buffer(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    added = settings.get("added_tokens_decoder", {})
    special = [tokenizers.AddedToken(**{**one, "special": True}) for one in added.values() if one.get("special")]
    tokenizer.add_special_tokens(special)  # older folders name some there only; a known token stays as it is
    added_tokens = tokenizer.get_added_tokens_decoder()
    ids = {token.content: index for index, token in added_tokens.items()}
    for name in SPECIAL_NAMES:
        text = _token_text(settings.get(name))
        if text is not None and text not in ids and (index := tokenizer.token_to_id(text)) is not None:
            ids[text] = index
    return _Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        ids=ids,
        special={index: token.content for index, token in added_tokens.items() if token.special},
        size=tokenizer.get_vocab_size(),
        identity=data,
    )


def _auto_tokenizer(spec: ModelSpec) -> _Tokenizer:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(spec.folder)
    identity = model_folder.model_digests(spec)["tokenizer"].encode()
    return _Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True)),
        ids=tokenizer.get_vocab(),
        special=dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)),
        size=len(tokenizer),
        identity=identity,
    )


def _stop_token_ids(spec: ModelSpec, config: Mapping[str, Any], eos: int | None) -> frozenset[int]:
    """Return the ids in generation_config.json, else those in config.json, and in any case the tokenizer's end of
    text."""
    said = read_json(spec.folder / "generation_config.json").get("eos_token_id")
    said = config.get("eos_token_id") if said is None else said
    ids = {*(said if isinstance(said, list) else [said]), eos} - {None}
    return frozenset(int(index) for index in ids)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _checked(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Raise ConfigError for arguments that only the renderer gives."""
    for name in kwargs:
        if name in GIVEN:
            raise ConfigError(f"chat_template_kwargs.{name}: every template is given its own; remove it")
        if not name.isidentifier():
            raise ConfigError(f"chat_template_kwargs.{name}: expected a name that a template can use")
    return dict(kwargs)


def _compile(text: str, *, where: str, now: Callable[[str], str]) -> tuple[jinja2.Template, frozenset[str]]:
    """Return the template, and the names that it reads and does not set itself. ConfigError if it is not valid."""
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
        return environment.from_string(text), frozenset(names)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{where}: {error}; mend the template") from None


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return f"sha256:{total.hexdigest()}"
