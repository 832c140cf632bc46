"""Reads shell scripts that launch a training: the script's variables, the overrides and flags of its commands, and how
many processes these start. Overrides win over files, as in verl.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import pairwise, takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.reading import arithmetic, flat, parse_value, read_text

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:[./][\w-]+)+)=(.*)", re.DOTALL)
ASSIGNMENT = re.compile(r"\s*(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
ONE_LINE_IF = re.compile(r"^(\s*if\b[^\n;]*);\s*then\s+([^\n\"']*?);?\s*fi\s*$", re.MULTILINE)
PAIR = re.compile(r"[A-Za-z_]\w*=")
COUNTS = ("num_processes", "nproc_per_node", "num_gpus")
LAUNCHERS = ("accelerate", "launch", "torchrun", "deepspeed", "python", "python3", "trl", "uv")
END = re.compile(r"[&|;]|\d?>|<(<|$)")  # not <|im_end|>
"""Words that end a command."""
HYDRA = {"n": "--config-name", "p": "--config-path"}
MOST_LINES = 100
"""Lines that one quoted text may have."""
ARRAY = re.compile(r"\s*(?:declare\s+-a\s+|local\s+)?(\w+)(\+?)=\((?!\()")
ELEMENTS = re.compile(r"\"?\$\{(\w+)\[([@*]|\d+)\]\}\"?")
"""The elements of an array, or one of them."""
UNSAID = (
    "how many that is, only the machine or the shell knows; the batch is without it: multiply feeder.groups_per_batch "
    "(of demonstrations: experts.per_batch) by it"
)
SERVER = {
    "max_model_len": "vllm_max_model_length",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
}
"""Flag of `trl vllm-serve` -> what the trainer's config calls it."""
NODES = ("nnodes", "num_nodes")
"""Flags of torchrun and deepspeed for the number of machines, each of which starts as many processes."""


def read_overrides(path: Path) -> dict[str, Any]:
    """Return the overrides `key.name=value` in a shell script, with the script's variables filled in. Text that only
    the shell can resolve is left unchanged, with its `$`."""
    found: dict[str, Any] = {}
    for words in shell_commands(path):
        for word in words:
            if override := OVERRIDE.fullmatch(word):
                value = parse_value(override[2])
                found |= flat({override[1]: value})
    if not found:
        raise ConfigError(
            f"{path}: no override such as data.train_batch_size=64 in it; name a script that launches verl"
        )
    return found


def read_branches(path: Path) -> dict[str, str]:
    """Return the overrides of a shell script whose variable is set differently in branches of an `if`, with the value
    of the last, which is taken."""
    last: dict[str, str] = {}
    for _ in shell_commands(path, last):
        pass
    text = read_text(path)
    return {
        override: value
        for name, value in last.items()
        for override in re.findall(rf"([A-Za-z_]\w*(?:\.[\w-]+)+)=[\"']?\$\{{?{name}\b", text)
    }


def read_named_config(path: Path) -> Path | None:
    """Return the YAML that a launch script names for hydra, in the folder that it names or beside the script, whether
    it is there or not; None if the script names none."""
    flags: dict[str, Any] = {}
    for words in shell_commands(path):
        every = _flags([re.sub(r"^-c([np])\b", lambda one: HYDRA[one[1]], word) for word in words])
        flags |= {flag: _listed(value)[0] for flag, value in every.items()}  # what follows are overrides
    if not (name := flags.get("config-name")):
        return None
    folder = str(flags.get("config-path", "."))
    places = [Path(folder), path.parent / folder, path.parent / Path(folder).name, path.parent]
    found = [place / f"{str(name).removesuffix('.yaml')}.yaml" for place in places]
    return next((one for one in found if one.is_file()), found[-1])


def shell_commands(
    path: Path, branches: dict[str, str] | None = None, *, in_arrays: bool = True
) -> Iterator[list[str]]:
    """Yield the words of each command in a shell script, with the script's variables filled in. Of a `case` whose value
    is known only the branch for it is read. `branches` gets the variables that an `if` sets to another value than
    before, with the last one. With `in_arrays` the elements of arrays are yielded as commands, too."""
    text = re.sub(r"\\[ \t]*\n", " ", read_text(path))
    variables: dict[str, str] = {"HOME": "~", "PWD": "."}
    text = ONE_LINE_IF.sub(lambda found: f"{found[1]}; then\n{found[2].replace(';', chr(10))}\nfi", text)
    arrays: dict[str, list[str]] = {}
    in_array, ifs = "", 0
    cases: list[list[Any]] = []  # of each `case` the value, whether its branch is being read, whether it has been
    for line in _whole_lines(text):
        line = _filled(line.replace("$(pwd)", "."), variables)
        if began := re.match(r"\s*case\s+[\"']?(.*?)[\"']?\s+in\b", line):
            cases.append([began[1], False, False])
            continue
        if cases and line.strip() == "esac":
            cases.pop()
            continue
        if cases and (branch := re.match(r"\s*\(?([^()\s]+)\)(.*)", line)):
            subject, _, is_over = cases[-1]
            is_it = not is_over and any(fnmatch(subject, one.strip("\"'")) for one in branch[1].split("|"))
            cases[-1], line = [subject, is_it or "$" in subject, is_over or is_it], branch[2]
        if cases and not cases[-1][1]:
            continue
        line = ELEMENTS.sub(lambda found: _elements(found, arrays), line)
        if began := ARRAY.match(line):
            line, in_array = line[began.end() :], began[1]
            arrays[in_array] = arrays.get(in_array, []) if began[2] else []
        filled = in_array
        if in_array and line.count(")") > line.count("("):
            line, in_array = line.rpartition(")")[0], ""
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # quotes in a variable
            continue
        if filled:
            arrays[filled] += words
            if ifs and words and branches is not None:
                branches[filled] = " ".join(words)
            if words and in_arrays:
                yield words
            continue
        if words and (variable := ASSIGNMENT.fullmatch(" ".join(words))) and not OVERRIDE.fullmatch(words[0]):
            if ifs and branches is not None and variables.get(variable[1]) not in (None, "", variable[2]):
                branches[variable[1]] = variable[2]
            variables[variable[1]] = variable[2]
        ifs += (words[:1] == ["if"]) - ("fi" in words[:1] + words[-1:])
        if words:
            yield words


def _elements(found: re.Match[str], arrays: Mapping[str, list[str]]) -> str:
    """Return the elements of an array as words; what stands there if the script does not make it."""
    words = arrays.get(found[1])
    if words is None or (found[2].isdigit() and int(found[2]) >= len(words)):
        return found[0]
    return shlex.join(words if not found[2].isdigit() else words[int(found[2]) :][:1])


def _whole_lines(text: str) -> Iterator[str]:
    """Yield the lines of a script, with those of one quoted text as one. A line whose quote stays open is left out."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        for end in range(at + 1, min(at + MOST_LINES, len(lines)) + 1):
            line = " ".join(lines[at:end])
            with suppress(ValueError):
                shlex.split(line, comments=True)
                yield line
                at = end
                break
        else:
            at += 1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command that launches a training: its files, its flags, and how many processes it starts."""

    files: tuple[Path, ...]
    settings: dict[str, Any]
    processes: int | None
    trainer: str | None
    environment: dict[str, str]
    """Variables that the shell script gives to it."""
    others: tuple[str, ...] = ()
    """Commands before and after it, each as a sentence on what to do."""


def read_launch(path: Path, trainers: Sequence[str]) -> Launch:
    """Return the command in a shell script that launches a training of TRL: `accelerate launch train.py --config
    grpo.yaml --seed 1`, or `trl grpo --config grpo.yaml`. ConfigError if there is none."""
    variables: dict[str, str] = {}
    environment: dict[str, str] = {}
    launch: Launch | None = None
    earlier: list[str] = []
    branches: dict[str, str] = {}
    for words in shell_commands(path, branches, in_arrays=False):
        pairs = [one.partition("=")[::2] for one in words if PAIR.match(one)]
        if words[0] == "export":
            named = {one: variables[one] for one in words[1:] if one in variables}
            environment |= named | dict(pairs)
        variables |= dict(pairs)
        if "-c" in words[:-1] and (option := words.index("-c")) and words[option - 1].endswith("sh"):  # bash -c "..."
            with suppress(ValueError):
                words = [*words[: option + 1], *shlex.split(words[option + 1]), *words[option + 2 :]]
        words = [*_with_files(words, path)]
        place = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
        trainer = None
        if place is None and "trl" in words[:-1] and words[words.index("trl") + 1] in trainers:
            place = words.index("trl") + 1
            trainer = words[place]
        if place is None:
            continue
        script = _beside(path, words[place])
        if launch is None and trainer is None and script.is_file() and "Trainer" not in read_text(script):
            earlier.append(script.name)
            continue
        if launch is not None:
            said = f"{path.name} goes on with `{shorten(' '.join(words), 60)}`, which is not in the run file"
            launch = replace(launch, others=(*launch.others, f"{said}: convert it apart"))
            continue
        starts = [number for number, word in enumerate(words[:place]) if word.rpartition("/")[2] in LAUNCHERS]
        ends = [number for number, word in enumerate(words) if number > place and END.match(word)]
        parts = (words[max(starts, default=0) : place], words[place + 1 : ends[0] if ends else None])
        launcher, given = ({name.replace("-", "_"): one for name, one in _flags(part).items()} for part in parts)
        alone = list(takewhile(lambda one: not one.startswith("--") and one not in ("$@", "$*"), parts[1]))
        before = next((number for number, word in enumerate(words) if not PAIR.match(word)), 0)
        environment |= dict(one.partition("=")[::2] for one in words[:before])
        files = [*([] if trainer else [words[place]]), *([str(given.pop("config"))] if "config" in given else [])]
        if trainer:  # trl's own command takes the flags of accelerate, too
            launcher |= {name: given.pop(name) for name in ("accelerate_config", "num_processes") if name in given}
        processes, unsaid = _processes(launcher)
        if processes is None and "srun" in words[:place] and "python" in words[place - 1]:
            processes = _slurm_tasks(path, words[words.index("srun") : place])
        project = {"wandb_project": environment["WANDB_PROJECT"]} if "WANDB_PROJECT" in environment else {}
        settings = {**project, **{f"launcher.{name}": value for name, value in launcher.items()}, **given}
        found = tuple(_beside(path, name) for name in files)
        launch = Launch(
            files=found,
            settings=settings,
            processes=processes,
            trainer=trainer,
            environment=dict(environment),
            others=(
                *unsaid,
                *(f"{one}: given to {words[place]}, and nothing here reads it: write what it sets" for one in alone),
                *(f"{path.name} runs {one} before, which no run does: run it first" for one in earlier),
                *(
                    f"{name}: {path.name} sets it in an `if`; {one!r}, its last, was taken"
                    for name, one in branches.items()
                ),
            ),
        )
    if launch is None and earlier:
        raise ConfigError(f"{path}: no trainer is made in {', '.join(earlier)}; name the script that makes one")
    if launch is None:
        raise ConfigError(f"{path}: launches no script and no trl; name the script and its YAML themselves")
    return replace(launch, settings=_of_server(path) | launch.settings)


def _of_server(path: Path) -> dict[str, Any]:
    """Return the flags of `trl vllm-serve`, which a script may start beside the training, as settings of TRL."""
    found: dict[str, Any] = {}
    for words in shell_commands(path, in_arrays=False):
        if "vllm-serve" in words:
            given = takewhile(lambda word: not END.match(word), words[words.index("vllm-serve") + 1 :])
            flags = {name.replace("-", "_"): value for name, value in _flags(list(given)).items()}
            flags.pop("model", None)
            found |= {SERVER.get(name, f"launcher.vllm_serve.{name}"): value for name, value in flags.items()}
    return found


def _processes(launcher: dict[str, Any]) -> tuple[int | None, list[str]]:
    """Take how many processes a launcher starts on all machines out of its flags. Return it, and what is to be done
    about counts that only the machine or the shell knows."""
    counts = {name: value for name in COUNTS if (value := launcher.pop(name, None)) is not None}
    processes = next((one for one in counts.values() if isinstance(one, int)), None)
    unsaid = {name: one for name, one in counts.items() if processes is None}
    for name in NODES:
        nodes = launcher.get(name, 1)
        if not isinstance(nodes, int):
            unsaid[name] = nodes
        elif nodes > 1 and processes is not None and "num_processes" not in counts:
            launcher["num_machines"], processes = launcher.pop(name), processes * nodes
    return processes, [f"{name} {value}: {UNSAID}" for name, value in unsaid.items()]


def _slurm_tasks(path: Path, words: Sequence[str]) -> int | None:
    """Return how many processes srun starts, by its own options and those of a batch script; None if none say it."""
    lines = [line.split()[1:] for line in read_text(path).splitlines() if line.startswith("#SBATCH ")]
    given = {name: value for part in (*lines, words) for name, value in _flags(part).items() if isinstance(value, int)}
    on_each = given.get("ntasks-per-node")
    return given.get("ntasks", None if on_each is None else on_each * given.get("nodes", 1))


def _with_files(words: Sequence[str], path: Path) -> Iterator[str]:
    """Yield words with the file in the place of `-m package.module`, if it is beside the shell script."""
    for word, after in pairwise([*words, ""]):
        if word == "-m" and _beside(path, _file_of(after)).is_file():
            yield _file_of(after)
        else:
            yield word


def _file_of(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _beside(path: Path, name: str) -> Path:
    """Return a file that a shell script names, which was started beside it, or in the working folder."""
    return next((one for one in (path.parent / name, Path(name)) if one.is_file()), path.parent / name)


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return flags with their values: `--name value`, `--name=value`, several values as a list, none as true."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word in ("$@", "$*"):  # whoever calls the script may add flags
            found["flags"] = word
        elif word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found[name] = parse_value(value) if has_value else True
        elif name:
            value = parse_value(word)
            found[name] = value if found[name] is True else [*_listed(found[name]), value]
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _filled(line: str, variables: Mapping[str, str]) -> str:
    """Fill in `$NAME`, `${NAME}`, `${NAME:-default}` and `$((sums))`, innermost first."""

    def product(match: re.Match[str]) -> str:
        names = re.sub(r"\$?\b([A-Za-z_]\w*)", lambda one: variables.get(one[1], one[0]), match[1])
        try:
            return str(arithmetic(ast.parse(names.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
            return match[0]

    def variable(match: re.Match[str]) -> str:
        default, value = match["default"], variables.get(match["name"] or match["bare"])
        if value is None or (not value and match["colon"]):
            return match[0] if default is None else default
        return value

    line = re.sub(r"\$\(\((.*?)\)\)(?!\))", product, line)
    inner = r"\$\{(?P<name>\w+)(?:(?P<colon>:?)-(?P<default>[^{}]*))?\}|\$(?P<bare>[A-Za-z_]\w*)"
    for _ in range(3):
        line = re.sub(inner, variable, line)
    return line
