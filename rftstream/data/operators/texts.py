"""Operators that skip problems by their text: its length, its content, its language."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.config.ranges import Count, Positive
from rftstream.data.operators.base import KEEP, Draw, Seed, Skip, TaskDecision
from rftstream.data.operators.facts import Facts
from rftstream.errors import ConfigError


class Length:
    """Skips problems by the number of characters of their prompt, all messages together."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "length"`."""

        min_characters: Count = 0
        """Smallest length; shorter prompts are skipped."""
        max_characters: Positive | None = None
        """Greatest length; longer prompts are skipped; default: none. The taskset's `too_long` handles the model's
        context."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.max_characters is not None and config.max_characters < config.min_characters:
            raise ConfigError(
                f"max_characters: got {config.max_characters}, expected at least min_characters = "
                f"{config.min_characters}"
            )

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a prompt out of range."""
        length = sum(len(message.content) for message in draw.problem.messages)
        if length < self._config.min_characters:
            return Skip("too short")
        if self._config.max_characters is not None and length > self._config.max_characters:
            return Skip("too long")
        return KEEP


class Regex:
    """Skips problems in which a regular expression is found, or in which another one is not found."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        r"""The settings of `op = "regex"`, for example `skip = "https?://"` for problems that need a page."""

        field: Literal["prompt", "answer"] = "prompt"
        """Field that is searched: each message of the prompt, or the reference answer (empty if there is none)."""
        skip: str | None = None
        """Expression whose presence skips a problem."""
        need: str | None = None
        """Expression whose absence skips a problem."""

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.skip is None and config.need is None:
            raise ConfigError("skip: found neither skip nor need, expected at least one regular expression")
        self._skip, self._need = _compiled("skip", config.skip), _compiled("need", config.need)

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem that the expressions exclude."""
        if self._config.field == "answer":
            texts = [draw.problem.answer or ""]
        else:
            texts = [message.content for message in draw.problem.messages]
        if self._skip is not None and any(self._skip.search(text) for text in texts):
            return Skip(f"{self._config.field} has {self._skip.pattern}")
        if self._need is not None and not any(self._need.search(text) for text in texts):
            return Skip(f"{self._config.field} lacks {self._need.pattern}")
        return KEEP


def _compiled(name: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}: {pattern!r} is no regular expression: {error}") from None


_SCRIPTS = {
    "ARABIC": "ar",
    "GREEK": "el",
    "HEBREW": "he",
    "DEVANAGARI": "hi",
    "HANGUL": "ko",
    "THAI": "th",
    "CJK": "zh",
}
_SCRIPTS |= {"HIRAGANA": "ja", "KATAKANA": "ja"}
"""First word of a letter's Unicode name -> language. Latin and Cyrillic letters need words to decide."""

_WORDS = {
    language: frozenset(words.split())
    for language, words in {
        "bg": "и в на за от се да не са по ще как колко които това към една този тази когато беше има всеки след",
        "cs": "a je se na že v z do pro jsou jak kolik který která když ale nebo jako byl bylo tento každý má po při",
        "da": "og er det en et af til på den at som har hvor mange med for ikke hvad der hver når deres efter blev fra",
        "de": "der die das und ist ein eine einen den dem des mit wie viele von zu auf für nicht wenn jeder sich wird",
        "en": "the of and is in to a how many what that for with if are be each has on as by find he she it this from",
        "es": "el la los las de que y en un una es por con para cuántos cuál se del si cada no su como qué tiene son",
        "fi": "ja on ei että kuinka monta mikä se hän jos kun ovat joka oli mutta kuin tai sen ne jokainen paljon",
        "fr": "le la les des et est un une de du que qui dans pour combien si chaque il elle au sur avec a quel sont",
        "hu": "a az és hogy nem egy mennyi hány ha van minden ez ami volt mint vagy azt meg számot ki milyen mi",
        "it": "il lo la gli di che e è un una per con quanti quale se ogni non del della sono ha nel i le come si",
        "nl": "de het een en van is hoeveel dat in op te met voor niet als elke zijn wat die er bij hij zij heeft aan",
        "pl": "i w na z że jest się nie do ile jak które który która jeśli każdy dla po to są był ma od ze oraz przez",
        "pt": "o a os as de que e em um uma é por com para quantos qual se do da não cada no na são como tem ele ela",
        "ro": "și în de la este un o cu pe că câte care dacă nu din pentru sunt fiecare are ce se au al mai cât a",
        "ru": "и в на не что с по как сколько это если для из он она было каждый все его ее к у от были есть какой",
        "sv": "och är det en ett av till på den att som har hur många med för inte vad varje om när de från var efter",
        "tr": "ve bir bu kaç ne için ile olan her de da ise kadar olarak çok eğer sayı nedir daha var olduğu gibi",
        "uk": "і в на не що з по як скільки це якщо для із він вона було кожен всі його її до у від були є який та",
        "vi": "và là của có bao nhiêu một các cho trong được không với người những này khi hỏi số mỗi thì đã ở",
    }.items()
}

_LANGUAGES_OF_WORD = {
    word: tuple(language for language, words in _WORDS.items() if word in words)
    for word in frozenset().union(*_WORDS.values())
}

UNKNOWN = "unknown"
LANGUAGES = tuple(sorted({*_SCRIPTS.values(), *_WORDS}))
"""Supported languages, as ISO 639-1 codes."""

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_CODE = re.compile(r"```.*?```|\$\$.*?\$\$|\$[^$\n]*\$|\\[a-zA-Z]+|https?://\S+", re.DOTALL)


def detect(text: str, min_letters: int = 12) -> str:
    """Return the language of a text; `unknown` if it cannot be detected. Code blocks, formulas between dollar signs and
    addresses are ignored."""
    text = unicodedata.normalize("NFC", _CODE.sub(" ", text)).casefold()
    words = _WORD.findall(text)
    if text.isascii():
        letters = Counter(LATIN=sum(map(len, words)))
    else:
        letters = Counter(_script(letter) for word in words for letter in word)
    if sum(letters.values()) < (min_letters if letters["LATIN"] + letters["CYRILLIC"] else min(min_letters, 4)):
        return UNKNOWN
    script = max(letters, key=lambda name: (letters[name], name))
    if letters["HIRAGANA"] + letters["KATAKANA"] > 0 and script in ("CJK", "HIRAGANA", "KATAKANA"):
        return "ja"
    if script in _SCRIPTS:
        return _SCRIPTS[script]
    if script == "CYRILLIC" and any(letter in text for letter in "іїєґ"):
        return "uk"
    scores = Counter(language for word in words for language in _LANGUAGES_OF_WORD.get(word, ()))
    (best, count), (_, second) = [*scores.most_common(2), ("", 0), ("", 0)][:2]
    return best if count >= max(2, len(words) // 12) and count > second else UNKNOWN


def _script(letter: str) -> str:
    if letter < "\u0250":
        return "LATIN"
    return unicodedata.name(letter, "?").partition(" ")[0]


class LanguageFilter:
    """Skips problems in other languages than the wanted ones.

    The detector is small and gives the same results everywhere: it uses scripts, and for Latin and Cyrillic letters the
    most frequent short words of a language. It knows the languages in `LANGUAGES`. Its limits: short texts, formulas
    and code are `unknown`; it cannot separate close relatives without their own words (Norwegian is detected as Danish;
    Ukrainian has its own letters and is separated from Russian); a mixed text gets one language."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings of `op = "language"`."""

        keep: Annotated[tuple[str, ...], Meta(min_length=1)] = ("en",)
        """ISO 639-1 codes of the wanted languages; `LANGUAGES` of the operator's module lists the supported ones."""
        keep_unknown: bool = True
        """Keep problems whose language cannot be detected, such as formulas."""
        min_letters: Count = 12
        """Smallest number of letters, outside code and formulas; shorter texts are of unknown language."""

    def __init__(self, config: Config) -> None:
        self._config = config
        for code in config.keep:
            if code not in LANGUAGES:
                raise ConfigError(f"keep: unknown language {code!r}; known: {', '.join(LANGUAGES)}")

    def decide(self, draw: Draw, facts: Facts, seed: Seed) -> TaskDecision:
        """Return Skip for a problem in another language. System messages do not count."""
        text = "\n".join(message.content for message in draw.problem.messages if message.role != "system")
        language = detect(text, self._config.min_letters)
        if language in self._config.keep or (language == UNKNOWN and self._config.keep_unknown):
            return KEEP
        return Skip(f"language {language}")
