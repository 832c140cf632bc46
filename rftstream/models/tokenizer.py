"""The tokenizer of a model folder, whichever library reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rftstream.models import folder as model_folder
from rftstream.models.spec import ModelSpec

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer, whichever library it is from. `open_tokenizer` makes it; renderers call it."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    """Return the text without special tokens."""
    ids: Mapping[str, int]
    """Text -> id, at least of the tokens that have a name."""
    special: Mapping[int, str]
    """Id -> text of the tokens that `decode` leaves out."""
    added: Mapping[int, str]
    """Id -> text of the tokens at which a text is split before anything else; no piece reaches over one of them."""
    size: int
    identity: bytes = field(repr=False)
    """Bytes that stand for the whole tokenizer in digests."""

    def is_left_out(self, token: int) -> bool:
        """Return whether `decode` leaves the token out."""
        return token in self.special or token >= self.size

    def runs(self, token_ids: Sequence[int]) -> list[tuple[list[int], bool]]:
        """Return runs of tokens, each with whether `decode` leaves it out."""
        found = groupby(map(int, token_ids), key=self.is_left_out)
        return [(list(run), left_out) for left_out, run in found]

    def name_of(self, token: int) -> str:
        """Return what people read for a token that `decode` leaves out."""
        return self.special.get(token, f"<{token}>")

    def full_text(self, token_ids: Sequence[int]) -> str:
        """Return the text with the special tokens in it."""
        return "".join(
            "".join(map(self.name_of, run)) if left_out else self.decode(run) for run, left_out in self.runs(token_ids)
        )

    def text_with(self, names: Collection[str], token_ids: Sequence[int]) -> str:
        """Return the text with those special tokens in it that have one of the names."""
        return "".join(
            "".join(name for name in map(self.name_of, run) if name in names) if left_out else self.decode(run)
            for run, left_out in self.runs(token_ids)
        )


def open_tokenizer(spec: ModelSpec, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of the model's folder. `settings`: what its tokenizer_config.json says."""
    fast = (spec.folder / "tokenizer.json").is_file()
    return _fast_tokenizer(spec, settings) if fast else _auto_tokenizer(spec)


def token_text(value: Any) -> str | None:
    """Return the text of a token as tokenizer_config.json gives it: plain, or in a map."""
    return value.get("content") if isinstance(value, dict) else value


def _fast_tokenizer(spec: ModelSpec, settings: Mapping[str, Any]) -> Tokenizer:
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
        text = token_text(settings.get(name))
        if text is not None and text not in ids and (index := tokenizer.token_to_id(text)) is not None:
            ids[text] = index
    return Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        ids=ids,
        special={index: token.content for index, token in added_tokens.items() if token.special},
        added={index: token.content for index, token in added_tokens.items()},
        size=tokenizer.get_vocab_size(),
        identity=data,
    )


def _auto_tokenizer(spec: ModelSpec) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(spec.folder)
    identity = model_folder.model_digests(spec)["tokenizer"].encode()
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True)),
        ids=tokenizer.get_vocab(),
        special=special,
        added=special | {index: text for text, index in tokenizer.get_added_vocab().items()},
        size=len(tokenizer),
        identity=identity,
    )
