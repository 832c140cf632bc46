"""The special tokens of a model folder, from each of the files that tokenizers keep them in.

Newer folders have them all in tokenizer_config.json. Older ones have them in special_tokens_map.json and
added_tokens.json, which are read unless tokenizer_config.json has `added_tokens_decoder`: that is how transformers does
it. What no file names may be a default of the tokenizer's class; only transformers knows these.
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
"""Keys of further special tokens. Only the first one that has any counts."""


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
        """Return the token that a value stands for, a text or a map; None if it stands for none."""
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
    """Name that templates use -> token: `bos_token` and the like, and names that the model alone has."""
    added: Mapping[int, TokenForm]
    """Id -> token that texts are split at."""
    more: tuple[TokenForm, ...]
    """Special tokens without a name."""
    told: frozenset[str]
    """Names that the files have, also those that they say there is no token for."""
    is_split: bool
    """Whether names of special tokens in a text are no tokens."""

    def tokens(self) -> Iterator[TokenForm]:
        """Yield all tokens, in the order in which a tokenizer that lacks them gives them ids."""
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
    """Return the tokens with these names that the tokenizer's class brings along, by name. Without transformers, or if
    it cannot read the folder, there are none."""
    try:
        from transformers import AutoTokenizer

        known = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).special_tokens_map
    except Exception as error:  # not installed, or a folder that it does not know the class of
        log.debug("transformers cannot say what %s has as %s: %r", folder, ", ".join(sorted(wanted)), error)
        return {}
    return {name: str(known[name]) for name in wanted if name in known}
