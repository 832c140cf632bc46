"""One conversion: the settings of another system, the run file that its rules write, and a report on each setting.

A system's rules ask `get` for a setting and `put` a value, `take` settings that mean the same here, and `leave` those
that have no counterpart. `finish` lists settings that no rule has read, so that none is dropped silently.
`rftstream.config.aliases` says where a setting is in a run file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, get_type_hints

from rftstream.config import aliases, loader
from rftstream.config.parts import registry
from rftstream.config.plain import toml_value
from rftstream.config.role_sections import FeederSection, TrackersSection, TrainerSection
from rftstream.config.sections import ModelSection, RunConfig, RunSection
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError
from rftstream.queries.plain import Report

ALIKE = (RunSection, ModelSection, Sampling, FeederSection, TrainerSection)
SECTIONS = {name: kind for name, kind in get_type_hints(RunConfig).items() if kind in ALIKE}
"""Sections in which a setting with the same name as another system's has the same meaning."""
ORDER = tuple(field.name for field in dataclasses.fields(RunConfig))
TRACKERS = tuple(field.name for field in dataclasses.fields(TrackersSection))
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}
SCHEDULES |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
DTYPES = ("bfloat16", "float16", "float32")
NUMBERS = ("max_steps", "save_steps", "eval_steps", "warmup_steps", "generation_batch_size", "steps_per_generation")
"""Settings without a default that are numbers."""
WIDTH = 120
COMMENT_WIDTH = 80
"""Longest line of the run file with a comment at its end, which stays readable beside the config."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A setting that was taken, with its place here and the way its value was computed."""

    there: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class NotTaken:
    """A setting that was not taken, with the reason."""

    there: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConvertedModule:
    """A module of Python that belongs beside the run file."""

    name: str
    text: str
    about: str
    """The names in it, and the file that they are from."""


@dataclass(frozen=True, slots=True)
class ConvertedConfig(Report):
    """The run file of a conversion, the modules beside it, and a report on each setting."""

    run_file: str
    taken: tuple[Taken, ...]
    not_taken: tuple[NotTaken, ...]
    to_do: tuple[str, ...]
    modules: tuple[ConvertedModule, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs that the run file names."""
        return len(set(re.findall(r'"cuda:(\d+)"', self.run_file)))

    def to_text(self) -> str:
        """Return as text what was taken, what was not, and what is left for the user to do."""
        width = max((len(one.key) for one in self.taken), default=0)
        reasons: dict[str, list[str]] = {}
        for one in self.not_taken:
            reasons.setdefault(one.reason, []).append(one.there)
        lines = ["taken:"]
        lines += [f"  {one.key.ljust(width)}  {toml_value(one.value)}  from {one.there}" for one in self.taken]
        lines += ["not taken:"] if reasons else []
        for reason, names in reasons.items():
            lines += textwrap.wrap(
                f"{', '.join(names)}: {reason}", WIDTH, initial_indent="  ", subsequent_indent="    "
            )
        lines += ["beside the run file:"] if self.modules else []
        lines += [f"  {one.name}: {one.about}" for one in self.modules]
        lines += ["to do:", *(f"  - {text}" for text in self.to_do)] if self.to_do else []
        return "\n".join(lines)


class Conversion:
    """The settings of another system's config while its rules convert them to a run file.

    A system's module makes it, applies its rules, and calls `finish` once. Names of settings are dotted paths.
    """

    def __init__(
        self,
        system: str,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        decided: Mapping[str, str],
        known: Sequence[str] = (),
    ) -> None:
        """`decided`: prefixes of names, and why a run file needs no such settings. `known`: the names of all settings
        that the other system has, if they are listed."""
        self.system = system
        self._decided, self._known = decided, list(known)
        self.algorithm = "grpo"
        self.taskset = "train"
        given = {name: value for name, value in given.items() if value is not None or name not in defaults}
        given = {name: _as_there(value, defaults.get(name), name) for name, value in given.items()}
        self._given = {**defaults, **given}
        self._theirs = set(defaults) - set(given)
        self._seen: set[str] = set()
        self._written: dict[str, Taken] = {}
        self._not_taken: list[NotTaken] = []
        self._to_do: list[str] = []
        self._open: set[str] = set()
        self.modules: list[ConvertedModule] = []

    def get(self, name: str, default: Any = None, *, only_given: bool = False) -> Any:
        """Return a setting, or the default if it is missing or none; if `only_given`, also where the config leaves it
        at the other system's default. The rule that calls this decides about the setting."""
        self._seen.add(name)
        value = None if only_given and name in self._theirs else self._given.get(name)
        return default if value is None else value

    def names(self, prefix: str) -> list[str]:
        """Return the names of all settings below a prefix."""
        return [name for name in self._given if name.startswith(prefix)]

    def put(self, key: str, value: Any, there: str) -> None:
        """Write a setting of the run file. `there` is the other system's name, with the arithmetic if there is any."""
        if key.startswith("algorithms.") and not self.has_setting(key):
            self.leave(there, f"{self.algorithm} has no setting {key.split('.', 2)[2]}")
            return
        first = re.split(r"[ ,:]", there)[0]
        said = f"{there} (default of {self.system})" if first in self._theirs else there
        self._written[key] = Taken(said, key, value)

    def put_placeholder(self, key: str, value: Any, there: str) -> None:
        """Write a setting that the user has to complete, as `ask` says: it is not reported as taken."""
        self.put(key, value, f"{there}: to do, see above")
        self._open.add(key)

    def take(self, names: Sequence[str]) -> None:
        """Take those settings, of these names, that are given and mean the same here."""
        for name in names:
            if (value := self.get(name)) is not None:
                for key in self.keys_of(name):
                    self.put(key, value, name)

    def keys_of(self, name: str) -> list[str]:
        """Return the places of another system's setting in this run file: by the table of aliases, else in the section
        or algorithm that has a setting of the same name."""
        last = name.rpartition(".")[2]
        same = [f"{one}.{last}" for one, kind in SECTIONS.items() if last in _names_of(kind)]
        found = aliases.meant(name) or same or [f"algorithms.{self.algorithm}.{last}"]
        for place, ours in (("algorithms.grpo", f"algorithms.{self.algorithm}"), (".NAME", f".{self.taskset}")):
            found = [key.replace(place, ours) for key in found]
        return list(found)

    def has_setting(self, key: str) -> bool:
        """Return whether the run's algorithm has a setting."""
        _, algorithm, name = key.split(".")[:3]
        return algorithm == self.algorithm and name in _names_of(registry.resolve("algorithm", algorithm).Config)

    def leave(self, name: str, reason: str, *, at_default: bool = False) -> None:
        """List a setting as not taken, unless its value is the other system's default; with `at_default`, also then."""
        self._seen.add(name)
        if at_default or re.split(r"[ ,:]", name)[0] not in self._theirs:
            self._not_taken.append(NotTaken(name, reason))

    def leave_unread(self, name: str, reason: str) -> None:
        """List a setting whose value is not known as something to write by hand; as not taken if no run file needs
        it."""
        if decided_reason(name, self._decided) is not None:
            self._not_taken.append(NotTaken(name, reason))
        elif (value := self._given.get(name)) is not None:
            of = f", {self.system}'s default" if name in self._theirs else ""
            self.ask(f"{name}: {reason}; {toml_value(value)} stands in its place{of}: write the right value")
        else:
            self.ask(f"{name}: {reason}; write it by hand if the training depends on it")

    def ask(self, text: str) -> None:
        """List something that the user has to do by hand."""
        if text not in self._to_do:
            self._to_do.append(text)

    # ---------------------------------------------------------------- settings that all systems have

    def name_run(self, name: Any, there: str) -> None:
        """Name the run as in the other system, with the characters that are allowed here."""
        plain = re.sub(r"[^a-z0-9_]+", "-", str(name).lower()).strip("-_")[:60]
        self.put("run.name", plain or "converted", there)

    def place(self, gpus: int | None, there: str, *, apart: int | None = None) -> None:
        """Put the trainer on the first GPU, and explorers on the `apart` GPUs after it (None: on all others); with
        none, explorers share the trainer's GPU in turns. `gpus` is None if nobody said how many: the run then takes
        those of its machine."""
        if gpus is None:
            self.put("trainer.device", "auto", "the GPUs of the machine that it runs on; --gpus N names them")
            return
        if gpus < 1:
            return
        self.put("trainer.device", "cuda:0", there)
        if self.algorithm in ("sft", "dpo", "reward_model"):
            return
        if num := gpus - 1 if apart is None else apart:
            self.put("explorer.count", num, there)
            self.put("explorer.devices", [f"cuda:{number + 1}" for number in range(num)], there)
        else:
            self.put("trainer.colocate", True, f"{there}: sampling and training take turns on the GPU")
            self.put("explorer.devices", ["cuda:0"], there)

    def track(self, wanted: Any, there: str, project: str) -> None:
        """Write the trackers with these names."""
        for name in [wanted] if isinstance(wanted, str) else wanted or ():
            if name in TRACKERS:
                self.put(f"trackers.{name}", "tensorboard" if name == "tensorboard" else project, there)
            elif name not in ("none", "console", "all"):
                self.leave(f"{there} = {name!r}", f"there are {', '.join(TRACKERS)}")

    def schedule(
        self,
        name: str,
        warmup: Any,
        warmup_name: str,
        steps: int | None,
        batches: int = 1,
        whole: Callable[[float], int] = int,
    ) -> None:
        """Take a schedule of the learning rate and its warm-up. The warm-up is in steps, or a share of all steps if
        below 1, of which `whole` makes a number of steps as the other system does."""
        kind = self.get(name, "constant")
        if kind in SCHEDULES:
            self.put("trainer.lr_schedule", SCHEDULES[kind], name)
            if SCHEDULES[kind] != "constant" and steps is None:
                self.ask(
                    "set run.steps, to rows x passes / rows of a batch: without it the learning rate does not fall "
                    f"({kind}), it stays constant"
                )
        else:
            self.put_placeholder("trainer.lr_schedule", "constant", name)
            self.ask(
                f"{name} = {kind!r} has no counterpart: after its warm-up the learning rate stays constant, until "
                "trainer.lr_schedule says linear or cosine"
            )
        if not warmup or warmup < 0:
            return
        if warmup >= 1:
            said = warmup_name + (f" {warmup} / {batches} optimizer steps per batch" if batches > 1 else "")
            self.put("trainer.warmup_steps", math.ceil(warmup / batches), said)
        elif steps is None:
            self.ask(
                f"set trainer.warmup_steps, to {warmup} of all steps ({warmup_name}), which the config does not say"
            )
        else:
            at = math.ceil(whole(warmup * steps * batches) / batches)
            self.put("trainer.warmup_steps", at, f"{warmup_name} {warmup} x {steps} steps")

    def keep(self, name: str) -> None:
        """Take the number of checkpoints to keep, which is two at least."""
        if count := self.get(name):
            self.put("trainer.keep_checkpoints", max(count, 2), f"{name} {count}, at least 2" if count < 2 else name)

    def lora(
        self,
        rank: str,
        alpha: str,
        targets: str,
        default_alpha: float,
        default_rank: int | None = None,
        rooted: str = "",
    ) -> None:
        """Take an adapter if it has a rank. `rooted` names the setting that divides alpha by the root of the rank."""
        wanted, size = self.get(targets), self.get(rank, default_rank)
        factor = float(self.get(alpha, default_alpha))
        if size:
            self.put("model.lora.rank", size, rank)
            if rooted and self.get(rooted):
                said = f"{rooted}: {alpha} {factor} x the root of {rank} {size}"
                self.put("model.lora.alpha", round(factor * math.sqrt(size), 3), said)
            else:
                self.put("model.lora.alpha", factor, alpha)
            self.put("model.lora.targets", wanted if isinstance(wanted, (list, tuple)) else "all-linear", targets)

    # ---------------------------------------------------------------- the end

    def finish(self) -> ConvertedConfig:
        """Return the run file and the report."""
        for name, value in self._given.items():
            if name not in self._seen and value is not None and value != {}:
                self.leave(f"{name} = {_short(value)}", self._reason(name))
        text = self._text()
        try:
            loader.from_toml(text)
        except ConfigError as error:
            self.ask(f"the run file does not load yet: {error}")
        taken = tuple(one for key, one in self._written.items() if key not in self._open)
        return ConvertedConfig(text, taken, tuple(self._not_taken), tuple(self._to_do), tuple(self.modules))

    def _reason(self, name: str) -> str:
        """Return why a setting that no rule has read is not taken."""
        if self._known and "." not in name and name not in self._known:
            near = registry.suggest(name, self._known)
            return f"{self.system} has no setting {name!r}" + (f"; {near}" if near.startswith("did you mean") else "")
        return decided_reason(name, self._decided) or "no counterpart here"

    def _text(self) -> str:
        sections: dict[str, list[str]] = {}
        for key, one in sorted(self._written.items(), key=lambda item: ORDER.index(item[0].partition(".")[0])):
            section, _, name = key.rpartition(".")
            line = f"{name} = {toml_value(one.value)}"
            is_short = len(line) + len(one.there) < COMMENT_WIDTH - 4
            lines = [f"{line}  # {one.there}"] if is_short else [f"# {one.there}", line]
            sections.setdefault(section, []).extend(lines)
        head = [f"# Made by `rftstream convert-config` from a config of {self.system}; comments name its settings."]
        head += [f"# Beside it: {one.name}, {one.about}" for one in self.modules]
        head += [f"# To do: {text}" for text in self._to_do]
        return "\n".join([*head, *(line for name, lines in sections.items() for line in ("", f"[{name}]", *lines)), ""])


def take_dtype(conversion: Conversion, names: Sequence[str]) -> None:
    """Take the data type of the model's weights, by whichever of these names it has."""
    for name in names:
        if (wanted := conversion.get(name, "auto")) in DTYPES:
            conversion.put("model.dtype", wanted, name)
        elif wanted != "auto":
            conversion.leave(name, f"{wanted!r}: there are {', '.join(DTYPES)}")


def decided_reason(name: str, decided: Mapping[str, str]) -> str | None:
    """Return why a run file needs no setting of this name, by the longest pattern that it begins with."""
    pattern = max((one for one in decided if re.match(one, name)), key=len, default=None)
    return None if pattern is None else decided[pattern]


def section_name(text: str) -> str:
    """Return a name for a taskset: the last meaningful part of a path, or of a name on a hub."""
    words = [word for word in re.split(r"[/\\:]", text.lower()) if word]
    parts = [re.sub(r"[^a-z0-9_]+", "-", PurePosixPath(word).stem).strip("-_") for word in words]
    telling = [part for part in parts if part and part not in ("train", "test", "val", "validation", "data", "hf")]
    return telling[-1][:40] if telling else "problems"


def _as_there(value: Any, default: Any, name: str) -> Any:
    """Return a number that is written as a text, where the other system has a number."""
    if isinstance(value, str) and (isinstance(default, (int, float)) or name in NUMBERS):
        with contextlib.suppress(ValueError):
            number = float(value)
            return int(number) if number.is_integer() and isinstance(default, (int, type(None))) else number
    return value


def _names_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, tuple, str, bool)) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def share(total: int, size: int, *, up: bool = False) -> tuple[int, str]:
    """Return how often a number is in another, at least once, and words that say so if it had to be rounded."""
    times = max(-(-total // size) if up else total // size, 1)
    return times, "" if times * size == total else f", rounded from {total / size:.4g}"


def many(value: Any) -> Sequence[Any]:
    """Return a list unchanged, and a single value as a list of one."""
    return value if isinstance(value, (list, tuple)) else [value]
