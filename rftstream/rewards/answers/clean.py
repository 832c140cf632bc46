r"""Normalises answers: Unicode, LaTeX decoration, brackets and spaces.

`clean` keeps the meaning of a text. It removes only formatting: sizes of brackets, spacing, fonts.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_VULGAR = re.compile("[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "÷": r"\div ", "∗": "*", "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ", "⩾": r"\ge ",
    "≧": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≒": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "ø": r"\emptyset ", "Ø": r"\emptyset ", "°": r"^\circ ",
    "º": r"^\circ ", "˚": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]",
    "ℝ": r"\mathbb{R}", "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "′": "'", "’": "'",
    "‘": "'", "“": '"', "”": '"', "、": ",", "。": ".", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "∶": ":", "⁄": "/", "∕": "/", "≡": r"\equiv ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "ω": r"\omega ", "φ": r"\phi ", "∧": r"\wedge ",
    "∨": r"\vee ", "∖": r"\setminus ", "→": r"\to ", "⇒": r"\implies ", "…": r"\ldots ", "【": "[", "】": "]",
    "《": '"', "》": '"',
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))

_RENAMED = {
    "frac": "dfrac tfrac cfrac xfrac",
    "binom": "dbinom tbinom",
    "le": "leq leqslant leqq",
    "ge": "geq geqslant geqq",
    "ne": "neq",
    "emptyset": "varnothing O",
    "approx": "simeq cong doteq",
    "{": "lbrace",
    "}": "rbrace",
    "pmod": "bmod mod",
    "ldots": "dots cdots dotsc dotsb dotsm",
    "cup": "bigcup",
    "epsilon": "varepsilon",
    "phi": "varphi",
    "setminus": "backslash smallsetminus",
}
"""Command -> other commands with the same meaning."""
_PLAIN = {"<": "lt", ">": "gt", "[": "lbrack", "]": "rbrack", "|": "lvert rvert vert mid", ":": "colon"}
_PLAIN |= {r"^\circ": "degree degrees"}
"""Plain text -> commands with the same meaning."""
_MEANT = {name: f"\\{command}" for command, names in _RENAMED.items() for name in names.split()}
_MEANT |= {name: text for text, names in _PLAIN.items() for name in names.split()}
_COMMAND = re.compile(rf"\\({'|'.join(_MEANT)})(?![a-zA-Z])")
_COMMANDS = (
    (re.compile(r"\\not\s*=(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\m?(?:left|right|middle)(?![a-zA-Z])\s*\.?(?=[\s()\[\]|\\.<>/]|$)"), ""),
    (re.compile(r"\\(?:[bB]igg?|[bB]igg?[lrm])(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:boldsymbol|bm|pmb|rm|bf|it|mathstrut)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:,|;|:|!|>|@|/)"), ""),
    (re.compile(r"\\(?:quad|qquad|hspace\*?\{[^{}]*\}|hfill|space|thinspace|enspace|nonumber)(?![a-zA-Z])"), " "),
    (re.compile(r"\\h?phantom\{[^{}]*\}|\\label\{[^{}]*\}|\\tag\*?\{[^{}]*\}"), ""),
    (re.compile(r"(?<!\\)\\ "), " "),
    (re.compile(r"(?<!\\)~"), " "),
    (re.compile(r"\\(?:mathrm|mathit|mathbf|mathsf|mathtt|mathnormal|textup|textnormal|textrm|textsf|texttt|mbox|hbox"
                r"|text ?|textbf|textit|operatorname\*?)\s*\{"), r"\\text{"),
)  # fmt: skip

_HIDDEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]")
_OPENED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|textit)\s*\{([^{}]*)\}|[$*]")
_LONE_DOLLAR = re.compile(r"(?<!\\)\$(?=\s*\d)")
_TIMES = re.compile(r"(?<=\d)\s+[xX]\s+(?=\d)")
_DOLLAR_AMOUNT = re.compile(r"\\\$")
_TRAILING = re.compile(r"(?:[\s.,;:!?]|\\\\)+$")
_BRACED_COMMA = re.compile(r"\{\s*,\s*\}")
_THIN_COMMA = re.compile(r",\s*\\!\s*")
_SPACES = re.compile(r"\s+")
_MARKDOWN = re.compile(r"\*\*(.+?)\*\*|__(.+?)__", re.DOTALL)
_COLOUR = re.compile(r"\\(?:text)?color\s*(?:\[[^\]]*\])?\{[^{}]*\}")


def clean(text: str) -> str:
    """Return a text in normal form: NFKC, plain commands, no decoration, no dollar signs around formulas."""
    text = plain_characters(without_hidden(text))
    if text.count("$") == 1:  # it is no mark of a formula
        text = _LONE_DOLLAR.sub(r"\\$", text)
    text = _MARKDOWN.sub(lambda match: match.group(1) or match.group(2), text)
    text = _COLOUR.sub("", text)
    text = _BRACED_COMMA.sub("{,}", text)
    text = _THIN_COMMA.sub("{,}", text)
    text = _COMMAND.sub(lambda match: _MEANT[match[1]], text)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _TIMES.sub(r" \\times ", text)
    text = _DOLLAR_AMOUNT.sub(r"\\dollar ", text)
    text = _without_math_marks(text)
    text = _SPACES.sub(" ", text).strip()
    text = strip_end(text)
    while (inner := _unwrapped(text)) is not None:
        text = strip_end(inner.strip())
    return text


def without_hidden(text: str) -> str:
    """Return a text without invisible characters: zero-width ones, direction marks, soft hyphens."""
    return _HIDDEN.sub("", text)


def opened_text(text: str) -> str:
    r"""Return a text in NFKC with `\text{}` replaced by its content, and without formula marks."""
    text = _OPENED.sub(lambda match: match.group(1) or "", text)
    return unicodedata.normalize("NFKC", without_hidden(text))


def plain_characters(text: str) -> str:
    """Return a text with one character for each sign, and LaTeX for superscripts, subscripts and mathematical
    letters."""
    text = _RAISED.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match.group()).replace("⁄", "/") + " ", text)
    text = _SIGN.sub(lambda match: _SIGNS[match.group()], text)
    text = unicodedata.normalize("NFKC", text)
    return _SIGN.sub(lambda match: _SIGNS[match.group()], text)


def strip_end(text: str) -> str:
    """Return a text without closing punctuation. Dots after digits and factorials stay."""
    while match := _TRAILING.search(text):
        tail = match.group()
        if "!" in tail:
            tail = tail[tail.rindex("!") + 1 :]
            if not tail.strip():
                return text.strip()
        if re.fullmatch(r".*\.\s*\.\s*\.\s*", text[-8:], re.DOTALL):
            return text.strip()
        text = text[: len(text) - len(tail)]
    return text.strip()


def bare_words(text: str) -> str:
    r"""Return a text as plain words: `\text{}` replaced by its content, lower case, no decoration, single spaces."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\(?:dollar|ldots|[,;:! ])", " ", text)
    text = text.replace("{", "").replace("}", "").replace("$", "").replace('"', "")
    text = _SPACES.sub(" ", text).strip().casefold()
    text = strip_end(text).strip("'`* ")
    return re.sub(r"^(?:the|an?) (?=[a-z]{2})", "", text)


def compact(text: str) -> str:
    """Return a cleaned text without spaces and needless braces, for comparing spellings."""
    text = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"\1", text)
    text = text.replace("{,}", ",")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\{(\w)\}", r"\1", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def is_formula(text: str) -> bool:
    """Return whether a text contains more than words."""
    return bool(re.search(r"[\d\\^_=<>+*/|{}()\[\]]", re.sub(r"\\text\{([^{}]*)\}", r"\1", text)))


def _without_math_marks(text: str) -> str:
    text = re.sub(r"\\[()\[\]]", " ", text)
    return text.replace("$", " ")


def _unwrapped(text: str) -> str | None:
    """Return the text inside marks around the whole text, such as quotes or braces; None if there are none."""
    for left, right in (('"', '"'), ("`", "`"), ("*", "*"), ("'", "'")):
        if len(text) > 2 and text.startswith(left) and text.endswith(right) and text.count(left) == 2:
            return text[len(left) : -len(right)]
    boxed = re.match(r"\\(?:boxed|fbox|underline|mathcal|text)\s*\{", text)
    start = boxed.end() - 1 if boxed else 0
    if text.startswith("{", start) and matching_brace(text, start) == len(text) - 1:
        return text[start + 1 : -1]
    return None


def matching_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at `start`; None if there is none. `\{` and `\}` do not
    count."""
    depth = 0
    place = start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return None
