"""Conversion rules for TRL's datasets: source, options and columns of a taskset, an evaluation or demonstrations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.integrations.foreign_configs.conversion import Conversion, ConvertedModule
from rftstream.integrations.foreign_configs.trl.files import (
    FORMATS,
    count_repeated,
    count_rows,
    described,
    form_of_prompts,
    rows_file,
    rows_of,
    source_of,
)
from rftstream.integrations.foreign_configs.trl.scripts.modules import Script

KNOWN = ("prompt", "messages", "answer", "completion", "chosen", "rejected", "images")
OURS = {"solution": "answer", "ground_truth": "answer", "image": "images"}
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template of prompts that are texts, which TRL gives to the model as they are."""
TEXTS = (
    "where prompts are texts and not messages: TRL shows them to the model as they are, a run as messages of a user; "
    f"bare they are by model.chat_template, a file with {BARE}"
)
SHUFFLED = ("jsonl", "csv", "parquet")
"""Sources whose rows can be counted in a shuffled order."""
HELD_OUT = 100
"""Rows that are held out where their number is not known."""


@dataclass(frozen=True, kw_only=True)
class SourceOfRows:
    """The settings of a section about its rows, made by `DatasetRules.source`."""

    settings: dict[str, Any]
    """source, options, columns, system and chat template."""
    there: str
    """The settings of TRL that the options were taken from."""
    num_rows: int | None = None
    """Rows that are used, if they are known."""


def with_evaluation(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of TRL's command line with the dataset that it evaluates on, another split of the one that it
    trains on."""
    if settings.get("eval_strategy", "no") in (False, "no") or not settings.get("dataset_name"):
        return settings
    same = {f"eval_{name}": settings[name] for name in ("dataset_name", "dataset_config") if name in settings}
    rest = {name: value for name, value in settings.items() if name != "dataset_test_split"}
    return {**rest, **same, "eval_dataset_train_split": settings.get("dataset_test_split", "test")}


def of_mixture(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the settings of TRL's command line with its list `datasets` under the names of one dataset, and words for
    the list if it has several, which TRL joins."""
    if not (mixed := settings.get("datasets")) or not isinstance(mixed, list):
        return settings, ""
    rest = {name: one for name, one in settings.items() if not name.startswith("dataset_") and name != "datasets"}
    if len(mixed) > 1:
        said = ", ".join(" ".join(f"{key} {one}" for key, one in each.items()) for each in mixed)
        return rest, f"TRL joins {said}"
    words = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split", "columns": "columns"}
    return {**rest, **{words.get(key, f"load_dataset.{key}"): one for key, one in mixed[0].items()}}, ""


class DatasetRules:
    """The rules for the datasets of one script or YAML. `source` is called for each of them."""

    def __init__(
        self,
        conversion: Conversion,
        script: Script,
        path: Path,
        asked: set[str],
        *,
        samples: bool,
        by_math: bool,
        by_chat: bool,
    ) -> None:
        """`asked` gets the datasets that the user is asked to write. `by_math`: whether a reward of TRL compares with
        the column `solution`; `by_chat`: whether one of TRL reads messages, so that prompts are lists of messages."""
        self._c, self._script, self._path = conversion, script, path
        self._asked, self._samples, self._by_math, self._by_chat = asked, samples, by_math, by_chat

    def source(self, prefix: str) -> SourceOfRows:
        """Return what is known of a dataset, or a placeholder for it. `prefix`: `eval_`, or nothing for training."""
        c = self._c
        name, whole = c.get(f"{prefix}dataset_name"), f"{prefix or 'train_'}dataset"
        if name is None:
            where = self._script.unreadable.get(whole, "none is named")
            images = self._script.images
            columns = self._columns({images: images} if images else {})
            if self._samples and self._script.makes_chats:
                columns = {"messages": "prompt", **columns}
            source = self._by_hand(prefix, f"that the trainer gets ({where})", shows_images=bool(images))
            return SourceOfRows(settings={"source": source, **({"columns": columns} if columns else {})}, there=whole)
        if changes := self._changes(prefix):
            return self._changed(prefix, changes)
        if place := self._script.unreadable.get(whole):
            c.ask(
                f"{whole}: {place} could not be read; what the script changes in rows of {name} is not in the run file"
            )
            self._asked.add(whole)
        source, split, limits = self._place(prefix, name)
        scheme, _, location = str(source).partition(":")
        of_hub = {
            "subset": c.get(f"{prefix}dataset_config"),
            "split": split,
            "revision": c.get(f"{prefix}load_dataset.revision"),
        }
        of_hub = of_hub if scheme == "hf" else {}
        there = count_rows(self._path.parent / location) if scheme == "jsonl" else None
        rows = None if there is None else max(there - limits.get("skip", 0), 0)
        rows = min([one for one in (rows, limits.get("size")) if one is not None], default=None)
        limits, rows, said = self._divided(prefix, limits, rows)
        seed = c.get(f"{prefix}dataset.shuffle_seed")
        if limits and seed is not None and self._samples:
            if scheme in SHUFFLED:
                limits["shuffle_seed"] = seed
            else:
                c.leave(f"{prefix}dataset.shuffle", "the rows that are taken are the first ones, in the source's order")
        if limits and not (self._samples or of_hub):  # demonstrations in files are taken whole
            shuffled = "" if seed is None else f" after a shuffle with seed {seed}"
            taken = ", ".join(f"{key} {value}" for key, value in limits.items())
            is_divided = c.get(f"{prefix}dataset.train_test_split") is not None
            change = f"some of its rows are taken{shuffled} ({taken})"
            return self._changed(prefix, [change], num_rows=None if is_divided else rows)
        template = c.get(f"{prefix}dataset.template")
        if template and not self._samples:
            c.leave(f"{prefix}dataset.template = {template!r}", "only tasksets have one; make such rows beforehand")
            template = None
        options = {**of_hub, "template": template, "answer_after": c.get(f"{prefix}dataset.answer_after"), **limits}
        given: dict[str, str] = c.get(f"{prefix}dataset.columns") or {}
        if not self._samples and {"completion", "chosen"} & set(given):  # the prompt's message is a text here
            given = {"prompt" if name == "messages" else name: column for name, column in given.items()}
        file = self._path.parent / location if scheme == "jsonl" else None
        if file is not None and not self._samples and (repeated := count_repeated(file)):
            said = f"TRL trains on each, here on one of them: {repeated:,} of {location} are left out"
            c.leave("rows that are the same as an earlier one", said, at_default=True)
        columns, is_text = self._shown(self._columns(given), template, file)
        found = {
            "source": source,
            "options": {key: value for key, value in options.items() if value is not None},
            "columns": columns,
            "system": c.get(f"{prefix}dataset.system"),
            "chat_template": BARE if is_text else None,
        }
        settings = {key: value for key, value in found.items() if value}
        return SourceOfRows(settings=settings, there=whole + said, num_rows=rows)

    def _shown(self, columns: dict[str, str], template: str | None, file: Path | None) -> tuple[dict[str, str], bool]:
        """Return the columns with that of prompts as what they are in the file, and whether they are texts, which TRL
        shows bare. Where no file says it, the user is told."""
        if "messages" in columns or template or not self._samples:
            return columns, bool(template and "messages" not in columns)
        if file is None:
            if "prompt" in columns or not self._script.makes_chats:
                self._c.ask(TEXTS)
            return columns, False
        column = columns.get("prompt", "prompt")
        form = form_of_prompts(file, column)
        if form is list:
            columns = {"messages": column, **{name: one for name, one in columns.items() if name != "prompt"}}
        return columns, form is str

    def _changed(self, prefix: str, changes: list[str], *, num_rows: int | None = None) -> SourceOfRows:
        """Return a placeholder for a dataset that the script changes in ways that no setting does."""
        c = self._c
        names: dict[str, str] = c.get(f"{prefix}dataset.columns") or {}
        for name in c.names(f"{prefix}dataset.") + c.names(f"{prefix}dataset_") + c.names(f"{prefix}load_dataset"):
            c.get(name)  # all of it is in the rows that the script writes
        place = f"that the trainer gets: {'; '.join(changes)}, which no setting does"
        source = self._by_hand(prefix, place, shows_images=bool({"image", "images"} & set(names)))
        columns = self._columns({name: name for name in names if name not in ("messages", "prompt")})
        is_text = any("apply_chat_template" in one for one in changes)
        if is_text and not self._samples:
            c.ask(
                "a chat template has made texts of the rows: TRL trains on these as they are, a run takes messages, "
                "which its own template makes texts of; write the messages, without apply_chat_template"
            )
        if self._samples and not is_text and (self._script.makes_chats or self._by_chat):
            columns = {"messages": "prompt", **columns}
        found = {"source": source, "columns": columns, "chat_template": BARE if self._samples and is_text else None}
        there = f"{prefix or 'train_'}dataset"
        settings = {key: value for key, value in found.items() if value}
        return SourceOfRows(settings=settings, there=there, num_rows=num_rows)

    def held_out(self, prefix: str = "") -> float | None:
        """Return the share that `train_test_split` holds out, as far as the script says it."""
        split: Mapping[str, Any] | None = self._c.get(f"{prefix}dataset.train_test_split")
        if split is None or f"{prefix or 'train_'}dataset" in self._asked:  # the rows that the user writes are divided
            return None
        test, train = split.get("test_size"), split.get("train_size")
        share = test if test is not None else 0.25 if train is None else 1 - train
        return share if isinstance(share, float) else None

    def _changes(self, prefix: str) -> list[str]:
        """Return what the script does to rows that a run needs and no setting does. The rest is left."""
        c, found = self._c, []
        split = c.get(f"{prefix}dataset_train_split")
        if isinstance(split, str) and rows_of(split) is None:
            found.append(f"the split is {split!r}")
        of_hub = c.get(f"{prefix}dataset_name") not in FORMATS
        seed, limits = c.get(f"{prefix}dataset.shuffle_seed"), c.get(f"{prefix}dataset.select")
        if of_hub and seed is not None and limits and not c.get(f"{prefix}dataset.train_test_split"):
            found.append(f"rows {limits} of it are taken after a shuffle with seed {seed}")
        if (part := c.get(f"{prefix}load_dataset.field")) is not None:
            found.append(f"the rows are in the field {part!r}")
        for one in c.names(f"{prefix}dataset."):
            _, is_map, name = one.partition(f"{prefix}dataset.map: ")
            is_needed = name == "prompt" or self._script.reads(name) if self._samples else name in (*KNOWN, "text")
            if one == f"{prefix}dataset.map" or one.endswith(" of rows") or (is_map and is_needed):
                found.append(f"{one} is {c.get(one)}")
            elif is_map:
                c.leave(one, f"{c.get(one)}; make such rows beforehand, or use [[pipeline]]")
        return found

    def _place(self, prefix: str, name: str) -> tuple[Any, str | None, dict[str, int]]:
        """Return the source of a dataset that is named, its split, and which rows are taken."""
        c = self._c
        split, first, end = c.get(f"{prefix}dataset_train_split"), None, None
        if split is not None and (rows := rows_of(str(split))) is not None:
            split, first, end = rows
        files, folder = c.get(f"{prefix}load_dataset.data_files"), c.get(f"{prefix}load_dataset.data_dir")
        source: Any = f"hf:{name}"
        if name in FORMATS:
            source = source_of(name, files, folder, split or "train", self._path.parent, experts=not self._samples)
        elif files or folder:
            there = f"{prefix}load_dataset.{'data_files' if files else 'data_dir'} = {files or folder!r}"
            c.leave(there, 'fetch these files to a folder, and name it: source = "hf:FOLDER"')
        if source is None:
            place = f"that load_dataset returns for {described(name, files, folder)}"
            source, first, end = (
                self._by_hand(prefix, place, is_loaded=True),
                None,
                None,
            )  # what the user writes is sliced
        return source, split, _sliced(first or 0, end, c.get(f"{prefix}dataset.select"))

    def _divided(self, prefix: str, limits: dict[str, int], rows: int | None) -> tuple[dict[str, int], int | None, str]:
        """Return which rows are taken of a dataset that `train_test_split` divides, how many, and words that say so.
        The rows that are held out are the first ones in the source's order, or in the shuffled one."""
        c = self._c
        split, part = c.get(f"{prefix}dataset.train_test_split"), c.get(f"{prefix}dataset.part")
        after = c.get(f"{prefix}dataset.select_of_part")
        if split is None or not self._samples:
            return limits, rows, ""
        sizes = {name: split.get(name) for name in ("test_size", "train_size")}
        if set(sizes.values()) == {None}:
            sizes["test_size"] = 0.25
        name, size = next((name, one) for name, one in sizes.items() if one is not None)
        held = size if name == "test_size" else None
        if isinstance(size, float):
            share = size if name == "test_size" else 1 - size
            held = None if rows is None else math.ceil(share * rows)
        elif name == "train_size" and rows is not None:
            held = rows - size
        if held is None:
            held = HELD_OUT
            c.ask(
                f"train_test_split {name} {size}: of how many rows is not known here, so {held} are held "
                "out; put the right number into options.size of the evaluation and options.skip of the taskset"
            )
        skip = limits.get("skip", 0)
        end: int | None
        taken: int | None
        if part == "test":
            first, end, taken = skip, skip + held, held
        else:
            first, end = skip + held, skip + limits["size"] if "size" in limits else None
            taken = None if rows is None else max(rows - held, 0)
        limits = _sliced(first, end, after)
        ends = [one for one in (taken, limits.get("size")) if one is not None]
        return limits, min(ends, default=None), f", train_test_split {name} {size}: {held} rows are held out"

    def _by_hand(self, prefix: str, place: str, *, is_loaded: bool = False, shows_images: bool = False) -> str:
        """Ask the user for a file with the rows of a dataset, and return the source that reads it. `is_loaded`: the
        rows as they are loaded, not as the trainer gets them. `shows_images`: that have images, which are no JSON."""
        self._asked.add(f"{prefix or 'train_'}dataset")
        form, kind = ("parquet", "a Parquet file") if shows_images else ("jsonl", "JSON lines")
        lines, method = rows_file(self._path, prefix), "to_parquet" if shows_images else "to_json"
        file = lines.replace(".jsonl", f".{form}")
        section = "evaluations.held-out" if prefix else f"tasksets.{self._c.taskset}" if self._samples else "experts"
        text = None if is_loaded else self._script.rows.get(f"{prefix or 'train_'}dataset")
        if text is not None:
            text = text.replace(lines, file).replace(".to_json(str(", f".{method}(str(")
            module = f"write_{file.removesuffix(f'.{form}')}.py"
            self._c.modules.append(ConvertedModule(module, text, f"writes the rows of {self._path.name} to {file}"))
            self._c.ask(
                f"run `python {module}` where {self._path.name} runs: it writes {file} beside itself, where "
                f"{section}.source looks for the rows {place}"
            )
        else:
            self._c.ask(
                f"write the rows as {kind} to {file} beside the run file, where {section}.source looks for them; "
                f'`dataset.{method}("{file}")` in the script does, of the dataset {place}'
            )
        if self._samples and not prefix and not self._script.makes_chats:
            self._c.ask(TEXTS)
        return f"{form}:{file}"

    def _columns(self, made: Mapping[str, str]) -> dict[str, str]:
        """Return the columns under our names. The column that a reward compares with is the answer."""
        found = {OURS.get(name, name): column for name, column in made.items()}
        for name, column in made.items():
            ours = OURS.get(name, name if name in KNOWN else column)
            if name in (ours, column) or not self._samples or not self._script.reads(name):
                continue
            if not self._script.rename(name, ours):
                self._c.ask(
                    f"{name} is the column {column} of the rows, renamed by the map, which no setting does for "
                    f"rewards: call the parameter of the reward {ours}"
                )
        named = {
            name: column for name, column in found.items() if name in KNOWN and (name != column or name == "images")
        }
        if not self._samples:  # demonstrations have images in their messages
            named.pop("images", None)
        if self._by_chat and not {"prompt", "messages"} & set(found):
            named = {"messages": "prompt", **named}
        return {"answer": "solution", **named} if self._by_math and "answer" not in found else named


def _sliced(skip: int, end: int | None, selected: list[Any] | None) -> dict[str, int]:
    """Return `skip` and `size` for the rows from `skip` to `end`, and of these the ones of `select(range(...))`, whose
    end may be None."""
    first = skip + (selected[0] if selected and len(selected) > 1 else 0)
    last = selected[:2][-1] if selected else None
    ends = [one for one in (end, None if last is None else skip + last) if one is not None]
    return {**({"skip": first} if first else {}), **({"size": min(ends) - first} if ends else {})}
