"""The special tokens of a model folder, from all files in which tokenizers keep them.

Newer folders keep all of them in tokenizer_config.json. Older folders use special_tokens_map.json and
added_tokens.json. As in transformers, these two are read unless tokenizer_config.json has `added_tokens_decoder`. A
token that no file names may be a default of the tokenizer's class; only transformers knows these.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.models.folders.files import read_json

log = logging.getLogger(__name__)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SETTINGS, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_LISTS = ("extra_special_tokens", "additional_special_tokens")
"""Keys of further special tokens. Only the first key that has any tokens is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """One token as a file describes it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True

    @staticmethod
    def of(value: Any, **defaults: bool) -> TokenForm | None:
        """Return the token that a text or a map describes; None for another value."""
        if isinstance(value, str):
            return TokenForm(content=value, **defaults)
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            return None
        given = {key: one for key, one in value.items() if key in TokenForm.__slots__}
        return TokenForm(**{**defaults, **given})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a model folder, as its files define them. `read_special_tokens` makes it."""

    named: Mapping[str, TokenForm]
    """Name in templates -> token: `bos_token` and the like, and names that only this model has."""
    added: Mapping[int, TokenForm]
    """Id -> token at which texts are split."""
    more: tuple[TokenForm, ...]
    """Special tokens without a name."""
    told: frozenset[str]
    """Names that the files define, including names for which they say that there is no token."""
    is_split: bool
    """Whether names of special tokens in a text are split like other text, not read as tokens."""

    def tokens(self) -> Iterator[TokenForm]:
        """Yield all tokens. A tokenizer that lacks them assigns ids in this order."""
        yield from (token for _, token in sorted(self.added.items()))
        yield from self.named.values()
        yield from self.more


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Return the special tokens of a model folder. ConfigError for a file that is no JSON object."""
    settings = dict(read_json(folder / SETTINGS))
    added: dict[int, TokenForm] = {}
    if "added_tokens_decoder" in settings:
        for index, value in settings["added_tokens_decoder"].items():
            if (token := TokenForm.of(value, normalized=True, special=False)) is not None:
                added[int(index)] = token
    else:
        settings |= {key: value for key, value in read_json(folder / SPECIAL_MAP).items() if value is not None}
    listed = next((found for key in _LISTS if (found := settings.get(key))), ())
    own: dict[str, Any] = dict(listed) if isinstance(listed, Mapping) else {}
    own |= {key: value for key, value in settings.items() if key.endswith("_token") and TokenForm.of(value) is not None}
    named = {name: token for name, value in own.items() if (token := TokenForm.of(value)) is not None}
    more = () if isinstance(listed, Mapping) else tuple(filter(None, map(TokenForm.of, listed)))
    if "added_tokens_decoder" not in settings:
        special = {token.content for token in (*named.values(), *more)}
        for text, index in read_json(folder / ADDED).items():
            is_special = text in special
            added[int(index)] = TokenForm(content=text, normalized=not is_special, special=is_special)
    return SpecialTokens(
        named=named,
        added=added,
        more=more,
        told=frozenset(name for name in SPECIAL_NAMES if name in settings),
        is_split=bool(settings.get("split_special_tokens", False)),
    )


def class_defaults(folder: Path, wanted: Collection[str]) -> dict[str, str]:
    """Return the tokens with these names that are defaults of the tokenizer's class, by name. The result is empty if
    transformers is missing or cannot read the folder."""
    try:
        from transformers import AutoTokenizer

        known = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).special_tokens_map
    except Exception as error:  # not installed, or a folder of an unknown class
        log.debug("transformers cannot say what %s has as %s: %r", folder, ", ".join(sorted(wanted)), error)
        return {}
    return {name: str(known[name]) for name in wanted if name in known}
