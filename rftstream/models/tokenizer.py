"""The tokenizer of a model folder, for every library that may read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rftstream.errors import ConfigError
from rftstream.models.folders import folder as model_folder
from rftstream.models.folders.special_tokens import SpecialTokens, TokenForm, class_defaults, read_special_tokens
from rftstream.models.spec import ModelSpec

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer, independent of the library that reads it. `open_tokenizer` makes it; renderers call it."""

    encode: Callable[[str], Sequence[int]]
    encode_whole: Callable[[str], Sequence[int]]
    """Return the tokens of a whole text, with the tokens that the tokenizer adds before and after it."""
    decode: Callable[[list[int]], str]
    """Return the text without special tokens."""
    ids: Mapping[str, int]
    """Text -> id, at least for the tokens that have a name."""
    named: Mapping[str, str]
    """Name in templates -> text of the token: `eos_token` and the like."""
    special: Mapping[int, str]
    """Id -> text of the tokens that `decode` leaves out."""
    added: Mapping[int, str]
    """Id -> text of the tokens at which a text is split first. No other token crosses them."""
    size: int
    is_split: bool = False
    """Whether a text never becomes a special token."""
    serialized: Callable[[], str] | None = None
    """Return it in the form of a tokenizer.json; None if it has no such form."""
    identity: bytes = field(repr=False)
    """Bytes that identify the whole tokenizer in digests."""
    _left_out: np.ndarray = field(init=False, repr=False, compare=False)
    """Whether `decode` leaves out an id: at its place + 1, first ids below 0, last all that are not below `size`."""

    def __post_init__(self) -> None:
        left_out = np.zeros(self.size + 2, dtype=bool)
        left_out[[1 + token for token in self.special if 0 <= token < self.size]] = True
        left_out[-1] = True
        object.__setattr__(self, "_left_out", left_out)

    def left_out(self, ids_T: np.ndarray) -> np.ndarray:
        """Return which of the tokens `decode` leaves out."""
        return self._left_out.take(ids_T + 1, mode="clip")

    def runs(self, token_ids: Sequence[int] | np.ndarray) -> list[tuple[list[int], bool]]:
        """Return runs of tokens, each with whether `decode` leaves it out."""
        ids = np.asarray(token_ids, dtype=np.int64)
        left_out = self.left_out(ids)
        if len(ids) and not left_out.any():
            return [(ids.tolist(), False)]
        edges = np.flatnonzero(np.diff(left_out)) + 1
        runs = np.split(ids, edges) if len(ids) else []
        return [(run.tolist(), bool(left_out[begin])) for run, begin in zip(runs, [0, *edges], strict=False)]

    def name_of(self, token: int) -> str:
        """Return a readable name of a token that `decode` leaves out."""
        return self.special.get(token, f"<{token}>")

    def full_text(self, token_ids: Sequence[int]) -> str:
        """Return the text with the special tokens in it."""
        return "".join(
            "".join(map(self.name_of, run)) if left_out else self.decode(run) for run, left_out in self.runs(token_ids)
        )

    def text_with(self, names: Collection[str], token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text with those of its special tokens that have one of the names."""
        return "".join(
            "".join(name for name in map(self.name_of, run) if name in names) if left_out else self.decode(run)
            for run, left_out in self.runs(token_ids)
        )


def open_tokenizer(spec: ModelSpec, wanted: Collection[str] = ("eos_token",)) -> Tokenizer:
    """Return the tokenizer of the model's folder. `wanted`: names of special tokens that callers will need. If no file
    defines one of them, transformers is asked for it."""
    fast = (spec.folder / "tokenizer.json").is_file()
    return _fast_tokenizer(spec, wanted) if fast else _auto_tokenizer(spec)


def _fast_tokenizer(spec: ModelSpec, wanted: Collection[str]) -> Tokenizer:
    import tokenizers

    data = (spec.folder / "tokenizer.json").read_bytes()
    tokenizer = tokenizers.Tokenizer.from_buffer(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special = read_special_tokens(spec.folder)
    if untold := set(wanted) - special.told:
        defaults = class_defaults(spec.folder, untold).items()
        known = {name: TokenForm(content=text) for name, text in defaults if tokenizer.token_to_id(text) is not None}
        special = replace(special, named={**special.named, **known})
    _add(tokenizer, special)
    tokenizer.encode_special_tokens = special.is_split
    added_tokens = tokenizer.get_added_tokens_decoder()
    return Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        encode_whole=lambda text: tokenizer.encode(text).ids,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        ids={token.content: index for index, token in added_tokens.items()},
        named={name: token.content for name, token in special.named.items()},
        special={index: token.content for index, token in added_tokens.items() if token.special},
        added={index: token.content for index, token in added_tokens.items()},
        size=tokenizer.get_vocab_size(),
        is_split=special.is_split,
        serialized=tokenizer.to_str,
        identity=data + json.dumps([special.is_split, *map(asdict, special.tokens())]).encode(),
    )


def _add(tokenizer: tokenizers.Tokenizer, special: SpecialTokens) -> None:
    """Add the tokens that tokenizer.json lacks, or has in another form."""
    import tokenizers

    have = tokenizer.get_added_tokens_decoder().values()
    forms, texts = {repr(token) for token in have}, {token.content for token in have}
    named = {token.content for token in special.named.values()}
    described = {token.content for token in special.added.values()}
    new: dict[str, tokenizers.AddedToken] = {}
    for token in special.tokens():
        made = tokenizers.AddedToken(**asdict(token))
        if repr(made) not in forms if token.content in described else token.content not in texts:
            made.special = token.special or token.content in named
            new.setdefault(token.content, made)
    tokenizer.add_tokens(list(new.values()))


def _auto_tokenizer(spec: ModelSpec) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec.folder)
    except (ValueError, OSError) as error:
        if any(spec.folder.glob("*token*")) or any(spec.folder.glob("*vocab*")):
            raise
        raise ConfigError(
            f"model.path: {spec.folder} has no tokenizer (tokenizer.json and tokenizer_config.json); copy the files of "
            "the model that it was made from into it"
        ) from error
    identity = model_folder.model_digests(spec)["tokenizer"].encode()
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        encode_whole=tokenizer.encode,
        decode=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True)),
        ids=tokenizer.get_vocab(),
        named=tokenizer.special_tokens_map,
        special=special,
        added=special | {index: text for text, index in tokenizer.get_added_vocab().items()},
        size=len(tokenizer),
        identity=identity,
    )
