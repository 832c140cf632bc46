"""Chat templates in the styles of model families, each with what its model says and with what follows a turn.

The text of the templates is our own. `follows` writes in Python what a template writes after a turn: an oracle that
shares no code with the templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.contracts.tasks import ChatMessage

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a model says in a turn."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Style:
    """A family's way of writing."""

    source: str
    says: Callable[[Said], tuple[str, str]]
    """What was said -> text as the model writes it, and the stop token after it."""
    follows: Callable[[Sequence[ChatMessage]], str]
    """New messages -> text behind the stop token, up to the next completion."""
    control: tuple[str, ...]
    """Special tokens."""
    marks: tuple[str, ...] = ()
    """Added tokens that are not special."""
    stops: tuple[str, ...]
    tool_role: str = "tool"
    """Role in which results of tools come."""
    calls: bool = True
    """Whether its template shows tool calls."""
    reasons: bool = False
    """Whether its model thinks."""
    broken: frozenset[str] = frozenset()
    """Reasons for which an ordinary turn may begin a new segment."""
    keeps_reasoning: bool = False
    bare_is_exact: bool = True
    """Whether a turn without reasoning is written in the history as the model says it."""
    special: Mapping[str, str] = field(default_factory=dict)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def think(said: Said) -> str:
    return f"<think>\n{said.reasoning}\n</think>\n\n" if said.reasoning else ""


def hermes(said: Said) -> str:
    calls = [f"<tool_call>\n{dumped({'name': name, 'arguments': given})}\n</tool_call>" for name, given in said.calls]
    return "\n".join(filter(None, [said.content, *calls]))


def grouped(messages: Sequence[ChatMessage], role: str = "tool") -> list[list[ChatMessage]]:
    """Messages, with those of tools in a row together."""
    groups: list[list[ChatMessage]] = []
    for message in messages:
        if groups and message.role == role == groups[-1][-1].role:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def chatml_body(messages: Sequence[ChatMessage]) -> str:
    text = ""
    for group in grouped(messages):
        role = group[0].role
        body = group[0].content
        if role == "tool":
            role, body = "user", "\n".join(f"<tool_response>\n{one.content}\n</tool_response>" for one in group)
        text += f"<|im_start|>{role}\n{body}<|im_end|>\n"
    return text


CHATML_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content ~ '\n\n' }}{% endif %}"
    "{{ 'Tools:\n' }}{% for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}"
    "{%- endif %}"
)
CHATML_TOOL_MESSAGE = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
HERMES_CALLS = (
    "{%- for c in m.tool_calls %}{% if not loop.first or content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ c.function.arguments | tojson ~ \'}'
    "\n</tool_call>' }}{% endfor %}"
)
CHATML = (
    CHATML_TOOLS + "{%- for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL_MESSAGE + "{%- elif m.role == "
    "'assistant' %}{{ '<|im_start|>assistant\n' }}{% set content = m.content %}{{ content }}{% if m.tool_calls %}"
    + HERMES_CALLS + "{% endif %}{{ '<|im_end|>\n' }}{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
TRIMMED = CHATML.replace("set content = m.content", "set content = m.content | trim")
SHOUTED = CHATML.replace("set content = m.content", "set content = m.content | upper")  # as no family does
QWEN3 = (
    CHATML_TOOLS + "{%- set ns = namespace(last=messages | length - 1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL_MESSAGE + "{%- elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% set reasoning = '' %}"
    "{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' ~ reasoning.strip('\n') ~ '\n</think>\n\n' }}{% endif %}"
    "{{ content }}{% if m.tool_calls %}" + HERMES_CALLS + "{% endif %}{{ '<|im_end|>\n' }}"
    "{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
OPENED = QWEN3.replace("and (loop.last or reasoning)", "").replace(  # the prompt opens the reasoning
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
    "{{ '<think>\n' }}",
)
XML_CALLS = (
    "{%- for c in m.tool_calls %}{% if not loop.first or content %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n<function=' ~ c.function.name ~ '>\n' }}"
    "{%- for key, value in c.function.arguments | items %}{{ '<parameter=' ~ key ~ '>\n' ~ "
    "(value if value is string else value | tojson) ~ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}"
)
QWEN35 = OPENED.replace(HERMES_CALLS, XML_CALLS)
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' ~ date_string ~ '\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
    '{% if tools %}{{ \'\nReply with {"name": ..., "parameters": ...}\n\' }}'
    "{% for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' ~ call.name ~ \'", "parameters": \' ~ '
    "call.arguments | tojson ~ '}<|eot_id|>' }}"
    "{% elif m.role in ('tool', 'ipython') %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ m.content | tojson ~ '<|eot_id|>' }}"
    "{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content | trim ~ "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == 0 %}{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' ~ m.content ~ '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
    "{{ '{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ c.function.arguments | tojson ~ '}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' ~ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of nine letters') }}"
    "{% endif %}{{ '[TOOL_RESULTS]' ~ {'content': m.content} | tojson ~ '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}{% set ns.tool = false %}"
    "{{ '<｜User｜>' ~ m.content ~ '<｜Assistant｜>' }}"
    "{% elif m.role == 'tool' %}{% if not ns.tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}"
    "{% set ns.tool = true %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% elif m.role == 'assistant' %}{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% set ns.tool = false %}{% endif %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}{{ content }}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + "
    "'\n```<｜tool▁call▁end｜>' }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    "{% endif %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\n' }}{% for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}"
    "{% endif %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{% set reasoning = '' %}"
    "{% if '</think>' in content %}{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].strip() %}{% endif %}{{ '<|assistant|>\n' }}"
    "{{ '<think>' ~ (reasoning if loop.index0 > ns.last else '') ~ '</think>' }}"
    "{% if content.strip() %}{{ '\n' ~ content.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' ~ c.function.name ~ '\n' }}"
    "{% for key, value in c.function.arguments | items %}{{ '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ "
    "(value if value is string else value | tojson) ~ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|observation|>' }}{% endif %}{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{% else %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: low<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' ~ tools | tojson ~ '<|end|>' }}{% endif %}"
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}"
    "{{ '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' ~ "
    "call.arguments | tojson ~ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' ~ ns.name ~ ' to=assistant<|channel|>commentary<|message|>' "
    "~ m.content | tojson ~ '<|end|>' }}"
    "{% else %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
MADE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LINES = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}{{ 'assistant:' }}"
MOVING = (  # the system prompt stands before the last user's turn
    "{% for m in messages %}{% if loop.last %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
COUNTED = "{{ messages | length ~ ' messages\n' }}" + CHATML  # as a budget in the system prompt would be


def after_chatml(messages: Sequence[ChatMessage], prompt: str = "") -> str:
    return f"\n{chatml_body(messages)}<|im_start|>assistant\n{prompt}"


def after_llama(messages: Sequence[ChatMessage]) -> str:
    def body(message: ChatMessage) -> str:
        is_tool = message.role == "tool"
        role, text = ("ipython", dumped(message.content)) if is_tool else (message.role, message.content.strip())
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    return "".join(map(body, messages)) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def says_llama(said: Said) -> tuple[str, str]:
    if said.calls:
        return dumped({"name": said.calls[0][0], "parameters": said.calls[0][1]}), "<|eot_id|>"
    return said.content, "<|eot_id|>"


def after_gemma(messages: Sequence[ChatMessage]) -> str:
    (message,) = messages
    return f"\n<start_of_turn>{message.role}\n{message.content.strip()}<end_of_turn>\n<start_of_turn>model\n"


def after_mistral(messages: Sequence[ChatMessage]) -> str:
    return "".join(
        f"[TOOL_RESULTS]{dumped({'content': one.content})}[/TOOL_RESULTS]" if one.role == "tool"
        else f"[INST]{one.content}[/INST]" for one in messages
    )  # fmt: skip


def says_mistral(said: Said) -> tuple[str, str]:
    calls = ", ".join(dumped({"name": name, "arguments": given}) for name, given in said.calls)
    return (f"[TOOL_CALLS][{calls}]" if calls else said.content), "</s>"


def after_deepseek(messages: Sequence[ChatMessage]) -> str:
    text = ""
    for group in grouped(messages):
        if group[0].role == "tool":
            outputs = "".join(f"<｜tool▁output▁begin｜>{one.content}<｜tool▁output▁end｜>" for one in group)
            text += f"<｜tool▁outputs▁begin｜>{outputs}<｜tool▁outputs▁end｜>"
        else:
            text += f"<｜User｜>{group[0].content}<｜Assistant｜>"
    return f"{text}<think>\n"


def says_deepseek(said: Said) -> tuple[str, str]:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜>"
        for name, given in said.calls
    )
    end = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return f"{said.reasoning}\n</think>\n\n{said.content}{end}", "<｜end▁of▁sentence｜>"


def says_glm(said: Said) -> tuple[str, str]:
    def value_of(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value)

    calls = ""
    for name, given in said.calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value_of(value)}</arg_value>\n" for key, value in given.items()
        )
        calls += f"\n<tool_call>{name}\n{pairs}</tool_call>"
    body = f"\n{said.content.strip()}" if said.content.strip() else ""
    return f"<think>{said.reasoning}</think>{body}{calls}", "<|observation|>" if calls else "<|user|>"


def after_glm(messages: Sequence[ChatMessage]) -> str:
    text = ""
    for number, group in enumerate(grouped(messages)):
        is_tool = group[0].role == "tool"
        mark = "<|observation|>" if is_tool else f"<|{group[0].role}|>"
        body = "".join(f"\n<tool_response>\n{one.content}\n</tool_response>" for one in group)
        text += ("" if number == 0 else mark) + (body if is_tool else f"\n{group[0].content}")
    return f"{text}<|assistant|>\n"


def says_xml(said: Said) -> tuple[str, str]:
    def value_of(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value)

    calls = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value_of(value)}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in said.calls
    ]
    return f"{said.reasoning}\n</think>\n\n" + "\n".join(filter(None, [said.content, *calls])), "<|im_end|>"


def says_harmony(said: Said) -> tuple[str, str]:
    thought = f"<|channel|>analysis<|message|>{said.reasoning}<|end|><|start|>assistant" if said.reasoning else ""
    if said.calls:
        name, given = said.calls[0]
        return f"{thought} to=functions.{name}<|channel|>commentary json<|message|>{dumped(given)}", "<|call|>"
    return f"{thought}<|channel|>final<|message|>{said.content}", "<|return|>"


def after_harmony(messages: Sequence[ChatMessage]) -> str:
    return "".join(
        f"<|start|>functions.{one.name} to=assistant<|channel|>commentary<|message|>{dumped(one.content)}<|end|>"
        if one.role == "tool" else f"<|start|>{one.role}<|message|>{one.content}<|end|>" for one in messages
    ) + "<|start|>assistant"  # fmt: skip


IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HERMES_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHAT = {"control": IM, "marks": HERMES_MARKS, "stops": ("<|im_end|>", "<|endoftext|>")}
STYLES: dict[str, Style] = {
    "chatml": Style(
        source=CHATML, says=lambda said: (think(said) + hermes(said), "<|im_end|>"), follows=after_chatml,
        reasons=True, keeps_reasoning=True, **CHAT,
    ),
    "chatml, plain marks": Style(  # `<tool_call>` is text like any other
        source=CHATML, says=lambda said: (think(said) + hermes(said), "<|im_end|>"), follows=after_chatml,
        reasons=True, keeps_reasoning=True, control=IM, stops=("<|im_end|>",),
    ),
    "trimmed": Style(source=TRIMMED, says=lambda said: (hermes(said), "<|im_end|>"), follows=after_chatml, **CHAT),
    "shouted": Style(
        source=SHOUTED, says=lambda said: (hermes(said), "<|im_end|>"), follows=after_chatml, bare_is_exact=False,
        broken=frozenset({"turn_hidden", "template_changes_history"}), **CHAT,
    ),
    "qwen3": Style(
        source=QWEN3, says=lambda said: (think(said) + hermes(said), "<|im_end|>"), follows=after_chatml,
        reasons=True, **CHAT,
    ),
    "qwen3 without thinking": Style(
        source="{% set enable_thinking = false %}" + QWEN3, says=lambda said: (hermes(said), "<|im_end|>"),
        follows=lambda messages: after_chatml(messages, "<think>\n\n</think>\n\n"), bare_is_exact=False, **CHAT,
    ),
    "opened thought": Style(
        source=OPENED, says=lambda said: (f"{said.reasoning}\n</think>\n\n{hermes(said)}", "<|im_end|>"),
        follows=lambda messages: after_chatml(messages, "<think>\n"), reasons=True, bare_is_exact=False, **CHAT,
    ),
    "qwen3.5": Style(
        source=QWEN35, says=says_xml, follows=lambda messages: after_chatml(messages, "<think>\n"), reasons=True,
        bare_is_exact=False, **CHAT,
    ),
    "llama3": Style(
        source=LLAMA3, says=says_llama, follows=after_llama, stops=("<|eot_id|>", "<|eom_id|>"),
        control=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        special={"bos_token": "<|begin_of_text|>"},
    ),
    "gemma": Style(
        source=GEMMA, says=lambda said: (said.content, "<end_of_turn>"), follows=after_gemma, tool_role="user",
        control=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), stops=("<eos>", "<end_of_turn>"),
        calls=False, special={"bos_token": "<bos>"},
    ),
    "mistral": Style(
        source=MISTRAL, says=says_mistral, follows=after_mistral, stops=("</s>",),
        control=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                 "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        special={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "deepseek": Style(
        source=DEEPSEEK, says=says_deepseek, follows=after_deepseek, reasons=True, bare_is_exact=False,
        control=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
                 "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                 "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
                 "<｜tool▁output▁end｜>"),
        stops=("<｜end▁of▁sentence｜>",),
        special={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    ),
    "glm": Style(
        source=GLM, says=says_glm, follows=after_glm, reasons=True, bare_is_exact=True,
        control=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        marks=(*HERMES_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"), broken=frozenset({"other_stop"}),
    ),
    "harmony": Style(
        source=HARMONY, says=says_harmony, follows=after_harmony, reasons=True, stops=("<|return|>", "<|call|>"),
        control=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        broken=frozenset({"other_stop"}), bare_is_exact=False,
    ),
    "made": Style(
        source=MADE, says=lambda said: (said.content, "<|endoftext|>"), calls=False, control=("<|endoftext|>",),
        follows=lambda messages: "".join(one.content for one in messages), stops=("<|endoftext|>",),
        bare_is_exact=False,
    ),
    "lines": Style(
        source=LINES, says=lambda said: (f" {said.content}", "<|endoftext|>"), control=("<|endoftext|>",),
        follows=lambda messages: "\n" + "".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant:",
        stops=("<|endoftext|>",), calls=False, bare_is_exact=False,
    ),
    "moving": Style(
        source=MOVING, says=lambda said: (said.content, "<|im_end|>"), follows=after_chatml, calls=False,
        broken=frozenset({"template_changes_history"}), **CHAT,
    ),
    "counted": Style(
        source=COUNTED, says=lambda said: (hermes(said), "<|im_end|>"), follows=after_chatml,
        broken=frozenset({"template_changes_history"}), **CHAT,
    ),
}  # fmt: skip
