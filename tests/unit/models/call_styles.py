"""How model families write tool calls: a template for each, in our own words, and what its parser needs to find."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rftstream.models.rendering import HfRenderer
from rftstream.models.spec import ModelSpec
from tests.unit.models.styled import trained_tokenizer

ARGS = "c.function.arguments"
NAME = "c.function.name"
TEXT = "(v if v is string else v | tojson)"


def each(before: str, after: str = "", *, pair: str = "", between: str = "") -> str:
    """Jinja for all calls: what stands before the arguments of one, each pair of them, and behind them."""
    pairs = "{% for k, v in " + ARGS + " | items %}{{ " + pair + " }}{% endfor %}" if pair else ""
    join = "{% if not loop.last %}{{ '" + between + "' }}{% endif %}" if between else ""
    return (
        "{% for c in m.tool_calls %}{{ "
        + before
        + " }}"
        + pairs
        + "{{ "
        + (after or "''")
        + " }}"
        + join
        + "{% endfor %}"
    )


def as_json(opening: str, closing: str, *, key: str = "arguments", more: str = "") -> str:
    return each(f"""'{opening}{{"name": "' ~ {NAME} ~ '", "{key}": ' ~ {ARGS} | tojson ~ '{more}}}{closing}'""")


def listed(opening: str, closing: str, one: str) -> str:
    """All calls in one list."""
    return (
        "{% if m.tool_calls %}{{ '"
        + opening
        + "[' }}"
        + each(one, between=", ")
        + "{{ ']"
        + closing
        + "' }}{% endif %}"
    )


def tagged(opening: str, closing: str, *, lines: bool) -> str:
    nl = "\\n" if lines else ""
    return each(
        f"'{opening}\\n<function=' ~ {NAME} ~ '>\\n'", f"'</function>\\n{closing}'",
        pair=f"'<parameter=' ~ k ~ '>{nl}' ~ {TEXT} ~ '{nl}</parameter>\\n'", between="\\n",
    )  # fmt: skip


def pairs(opening: str, closing: str, *, sep: str = "", suffix: str = "", nl: str = "\\n") -> str:
    return each(
        f"'{opening}' ~ {NAME} ~ '{sep}{nl}'", f"'{closing}'", between="\\n",
        pair=f"'<arg_key{suffix}>' ~ k ~ '</arg_key{suffix}>{nl}<arg_value{suffix}>' ~ {TEXT} ~ "
        f"'</arg_value{suffix}>{nl}'",
    )  # fmt: skip


ONE_JSON = f"""'{{"name": "' ~ {NAME} ~ '", "arguments": ' ~ {ARGS} | tojson ~ '}}'"""
PYTHON = (
    "{% for c in m.tool_calls %}{{ c.function.name ~ '(' }}{% for k, v in c.function.arguments | items %}"
    "{{ k ~ '=' ~ v | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
)
GEMMA_VALUE = """(q ~ v ~ q if v is string else v | tojson)"""
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
KIMI_CALLS = (
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}"
    + each(f"'<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' ~ {ARGS} | tojson ~ '<|tool_call_end|>'")
    + "{{ '<|tool_calls_section_end|>' }}{% endif %}"
)
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HERMES = (*IM, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", *HERMES[3:],
       "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip
LAGUNA = ("〈|EOS|〉", "<think>", "</think>", "<assistant>", "</assistant>", "<tool_call>", "</tool_call>")
HY3 = ("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_eos:opensource｜>", "<｜hy_User:opensource｜>",
       "<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>",
       *(f"<{slash}{tag}:opensource>" for tag in ("think", "tool_calls", "tool_call", "arg_key", "arg_value",
                                                  "tool_responses", "tool_response") for slash in ("", "/")),
       "<tool_sep:opensource>")  # fmt: skip
INKLING = ("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>",
           "<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>",
           "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>",
           "<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>", "<|endoftext|>")  # fmt: skip
GEMMA = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>",
         "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|image>", "<|image|>",
         "<image|>")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallStyle:
    """How a family writes calls."""

    calls: str
    """Jinja for the calls of the message `m`."""
    tokens: tuple[str, ...]
    """Special tokens. The last one that ends a turn stands first."""
    signs: str = ""
    """What else stands in its templates, by which it is known."""
    end: str = ""
    families: tuple[str, ...] = ()
    """Names that the package of parsers has for models with this style."""
    is_single: bool = False
    """Whether a turn has one call at most."""
    keeps_ids: bool = False
    special: tuple[str, ...] = field(default=())


XML, PAIRS = tagged("<tool_call>", "</tool_call>", lines=True), pairs("<tool_call>", "</tool_call>")
STYLES = {
    "qwen3": CallStyle(calls=as_json("<tool_call>\\n", "\\n</tool_call>"), tokens=HERMES, end="<|im_end|>",
                       signs="<tool_response></think>", families=("qwen3", "qwen3-vl")),
    "qwen3-coder": CallStyle(calls=XML, tokens=HERMES, end="<|im_end|>",
                             families=("prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5")),
    "qwen3.5": CallStyle(calls=XML, tokens=(*HERMES, *VISION), end="<|im_end|>",
                         families=("qwen3.5", "qwen3.6", "qwen3.8")),
    "nemotron with marks as text": CallStyle(calls=XML, tokens=IM, end="<|im_end|>"),
    "glm": CallStyle(calls=PAIRS, tokens=GLM, end="<|user|>", signs="<|observation|>",
                     families=("glm-4.5",)),
    "glm on one line": CallStyle(calls=pairs("<tool_call>", "</tool_call>", nl=""), tokens=GLM, end="<|user|>",
                                 signs="<|observation|>", families=("glm-5", "glm-5.1", "glm-5.3")),
    "laguna": CallStyle(calls=PAIRS, tokens=LAGUNA, end="</assistant>", signs="<assistant>",
                        families=("laguna-xs.2", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1")),
    "hy3": CallStyle(
        calls="{% if m.tool_calls %}{{ '<tool_calls:opensource>\\n' }}" + pairs(
            "<tool_call:opensource>", "</tool_call:opensource>", sep="<tool_sep:opensource>", suffix=":opensource"
        ) + "{{ '\\n</tool_calls:opensource>' }}{% endif %}",
        tokens=HY3, end="<｜hy_eos:opensource｜>", signs="<｜hy_Assistant:opensource｜>", families=("hy3",)),
    "minimax": CallStyle(
        calls="{% if m.tool_calls %}{{ '<minimax:tool_call>\\n' }}" + each(
            f"""'<invoke name="' ~ {NAME} ~ '">\\n'""", "'</invoke>\\n'",
            pair=f"""'<parameter name="' ~ k ~ '">' ~ {TEXT} ~ '</parameter>\\n'""",
        ) + "{{ '</minimax:tool_call>' }}{% endif %}",
        tokens=("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        end="[e~[", families=("minimax-m2",)),
    "seed-oss": CallStyle(calls=tagged("<seed:tool_call>", "</seed:tool_call>", lines=False),
                          tokens=("<seed:bos>", "<seed:eos>", "<seed:tool_call>", "</seed:tool_call>"),
                          end="<seed:eos>"),
    "deepseek-v3": CallStyle(
        calls="{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}" + each(
            f"'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ {NAME} ~ '\\n```json\\n' ~ {ARGS} | tojson ~ "
            "'\\n```<｜tool▁call▁end｜>'", between="\\n") + "{{ '<｜tool▁calls▁end｜>' }}{% endif %}",
        tokens=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *DEEPSEEK,
                "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
                "<｜tool▁output▁end｜>"),
        end="<｜end▁of▁sentence｜>", families=("deepseek-v3", "deepseek-r1")),
    "deepseek-v3.1": CallStyle(
        calls="{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}" + each(
            f"'<｜tool▁call▁begin｜>' ~ {NAME} ~ '<｜tool▁sep｜>' ~ {ARGS} | tojson ~ '<｜tool▁call▁end｜>'"
        ) + "{{ '<｜tool▁calls▁end｜>' }}{% endif %}",
        tokens=("<｜end▁of▁sentence｜>", *DEEPSEEK), end="<｜end▁of▁sentence｜>"),
    "deepseek-v4": CallStyle(
        calls="{% if m.tool_calls %}{{ '<｜DSML｜tool_calls>\\n' }}" + each(
            f"""'<｜DSML｜invoke name="' ~ {NAME} ~ '">\\n'""", "'</｜DSML｜invoke>\\n'",
            pair="""'<｜DSML｜parameter name="' ~ k ~ '" string="' ~ ('true' if v is string else 'false') ~ '">' ~ """
            + TEXT + " ~ '</｜DSML｜parameter>\\n'",
        ) + "{{ '</｜DSML｜tool_calls>' }}{% endif %}",
        tokens=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜",
                "<think>", "</think>", "<｜latest_reminder｜>",
                *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url"))),
        end="<｜end▁of▁sentence｜>", families=("deepseek-v4",)),
    "deepseek-v3.2": CallStyle(
        calls="{% if m.tool_calls %}{{ '<｜DSML｜function_calls>\\n' }}" + each(
            f"""'<｜DSML｜invoke name="' ~ {NAME} ~ '">\\n'""", "'</｜DSML｜invoke>\\n'",
            pair="""'<｜DSML｜parameter name="' ~ k ~ '" string="' ~ ('true' if v is string else 'false') ~ '">' ~ """
            + TEXT + " ~ '</｜DSML｜parameter>\\n'",
        ) + "{{ '</｜DSML｜function_calls>' }}{% endif %}",
        tokens=("<｜end▁of▁sentence｜>", "｜DSML｜"),
        end="<｜end▁of▁sentence｜>"),
    "kimi-k2": CallStyle(
        calls=KIMI_CALLS,
        tokens=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", *KIMI),
        end="<|im_end|>", families=("kimi-k2",), keeps_ids=True),
    "kimi-k2.5": CallStyle(
        calls=KIMI_CALLS, signs="<|media_begin|>",
        tokens=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", *KIMI,
                "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "<|endoftext|>", "<think>",
                "</think>"),
        end="<|im_end|>", families=("kimi-k2.5",), keeps_ids=True),
    "gemma4": CallStyle(
        calls="""{% set q = '<|"|>' %}{% for c in m.tool_calls %}{{ '<|tool_call>call:' ~ c.function.name ~ '{' }}"""
        "{% for k, v in c.function.arguments | dictsort %}{{ k ~ ':' ~ " + GEMMA_VALUE + " }}"
        "{% if not loop.last %}{{ ',' }}{% endif %}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}",
        tokens=GEMMA, end="<turn|>", signs="<|turn>", families=("gemma4",)),
    "inkling": CallStyle(
        calls="{% for c in m.tool_calls %}{% if not loop.first %}{{ '<|message_model|>' }}{% endif %}"
        "{{ c.function.name ~ '<|content_invoke_tool_json|>{\"name\": \"' ~ c.function.name ~ '\", \"args\": ' ~ "
        "c.function.arguments | tojson ~ '}<|end_message|>' }}{% endfor %}",
        tokens=INKLING, end="<|content_model_end_sampling|>", signs="<|message_model|>", families=("inkling",)),
    "gpt-oss": CallStyle(
        calls=each(f"' to=functions.' ~ {NAME} ~ '<|channel|>commentary json<|message|>' ~ {ARGS} | tojson"),
        tokens=("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        end="<|call|>", signs="<|call|>", families=("gpt-oss",), is_single=True),
    "llama-3": CallStyle(calls=as_json("", "", key="parameters"), end="<|eot_id|>", families=("llama-3",),
                         tokens=("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"), is_single=True),
    "llama-3, python": CallStyle(calls="{% if m.tool_calls %}{{ '[' }}" + PYTHON + "{{ ']' }}{% endif %}",
                                 tokens=("<|eot_id|>", "<|python_tag|>"), end="<|eot_id|>"),
    "llama-4": CallStyle(
        calls="{% if m.tool_calls %}{{ '<|python_start|>[' }}" + PYTHON + "{{ ']<|python_end|>' }}{% endif %}",
        tokens=("<|eot|>", "<|python_start|>", "<|python_end|>"), end="<|eot|>"),
    "lfm2.5": CallStyle(
        calls="{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}" + PYTHON + "{{ ']<|tool_call_end|>' }}{% endif %}",
        tokens=(*IM, "<|tool_call_start|>", "<|tool_call_end|>"), end="<|im_end|>"),
    "phi-4-mini": CallStyle(calls=listed("<|tool_call|>", "<|/tool_call|>", ONE_JSON), end="<|end|>",
                            tokens=("<|end|>", "<|tool_call|>", "<|/tool_call|>")),
    "granite-3.3": CallStyle(calls=listed("<|tool_call|>", "", ONE_JSON), end="<|end_of_text|>",
                             tokens=("<|end_of_text|>", "<|tool_call|>")),
    "apertus": CallStyle(
        calls=listed("<|tools_prefix|>", "<|tools_suffix|>", f"""'{{"' ~ {NAME} ~ '": ' ~ {ARGS} | tojson ~ '}}'"""),
        tokens=("<|assistant_end|>", "<|tools_prefix|>", "<|tools_suffix|>"), end="<|assistant_end|>"),
    "command-r7b": CallStyle(
        calls=listed("<|START_ACTION|>", "<|END_ACTION|>",
                     f"""'{{"tool_call_id": "' ~ c.id ~ '", "tool_name": "' ~ {NAME} ~ '", "parameters": ' ~ """
                     f"""{ARGS} | tojson ~ '}}'"""),
        tokens=("<|END_OF_TURN_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>"), end="<|END_OF_TURN_TOKEN|>",
        keeps_ids=True),
    "mistral-small-3.2": CallStyle(
        calls=each(f"'[TOOL_CALLS]' ~ {NAME} ~ '[CALL_ID]' ~ c.id ~ '[ARGS]' ~ {ARGS} | tojson"), end="</s>",
        tokens=("</s>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), keeps_ids=True),
    "mistral-nemo": CallStyle(
        calls=listed("[TOOL_CALLS]", "",
                     f"""'{{"name": "' ~ {NAME} ~ '", "arguments": ' ~ {ARGS} | tojson ~ ', "id": "' ~ c.id ~ '"}}'"""),
        tokens=("</s>", "[TOOL_CALLS]"), end="</s>", keeps_ids=True),
}  # fmt: skip


def renderer_of(style: CallStyle, folder: Path, *, template: str | None = None) -> HfRenderer:
    """A renderer with the style's template: turns as `role:content`, and the calls."""
    import json

    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(trained_tokenizer())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(style.tokens)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": style.end, "bos_token": None}))
    (folder / "config.json").write_text("{}")
    source = template or (
        "{% if tools %}{{ 'tools:' ~ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ 'assistant:' ~ m.content }}" + style.calls + "{{ '" + style.end + "' }}{% else %}"
        "{{ m.role ~ ':' ~ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        "{# " + style.signs + " #}"
    )
    (folder / "chat_template.jinja").write_text(source)
    return HfRenderer(ModelSpec(name="m", folder=folder, dtype="float32", context=None))
