"""What a training script of TRL loads: its model, with data type, four bits, adapter and the name at the end of its
calls; and configs, as in `yaml.safe_load(open("config.yaml"))`."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from rftstream.integrations.foreign_configs.reading import read_yaml
from rftstream.integrations.foreign_configs.trl.scripts.beside import Values
from rftstream.integrations.foreign_configs.trl.scripts.modules import Script
from rftstream.integrations.foreign_configs.trl.scripts.rest import HARMLESS
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    UNKNOWN,
    Binding,
    Scope,
    UnreadableExpression,
    last_name,
)

NO_WORDS = ("[]", "''", "()", "None", "sys.argv[1:]", "args", "argv")
"""Arguments of `parse_args` with which it parses what the launch gives, or nothing."""
LOADERS = {"yaml": ("safe_load", "full_load", "load"), "json": ("load", "loads"), "OmegaConf": ("load",)}
HOW_LOADED = ("torch_dtype", "dtype", "load_in_4bit", "load_in_8bit", "quantization_config")
ADAPTER = "the adapter is not in the run file: merge it (merge_and_unload), and write its folder as model.path"
FOUR_BITS = "fp4, the default of transformers"
ON_GPUS = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
"""Questions about the machine, which trained on GPUs that can do this."""
ANSWERED = (*ON_GPUS, "getattr", "get_quantization_config", "join")
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MOVES = ("merge_and_unload", "to", "cuda", "cpu", "eval", "train", "half", "bfloat16", "float")
"""Methods that return the model that they are called on."""
CHATTY = ("setup_chat_format", "clone_chat_template")
"""Functions of TRL that give another chat template to a model."""
PREPARED = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
MODELS = ("from_pretrained", "get_peft_model", "create_reference_model", "deepcopy", *PREPARED, *CHATTY)
"""Calls whose first argument says which model they return."""


CHANGES: dict[type, tuple[str, ...]] = {
    dict: ("update", "pop", "setdefault", "clear", "items", "keys", "values", "get"),
    list: ("append", "extend", "insert", "remove", "pop", "reverse", "sort", "clear"),
}
"""Methods that change a value, which are followed."""


class Arguments(Values, Protocol):
    """The values of a script's expressions, and what its calls are given. ScriptReader is one."""

    def arguments(self, call: ast.Call, scope: Scope, script: Script, prefix: str = "") -> dict[str, Any]:
        """Return the keyword arguments of a call."""

    def lora(self, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
        """Return the settings of an adapter."""


def loaded_as(reader: Arguments, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
    """Return how the script loads its model itself, and the adapter that it gives to it."""
    found: dict[str, Any] = {}
    with contextlib.suppress(*UNKNOWN):
        node, scope = reader.resolved(node, scope)
        while (origin := made_of(node)) is not None:
            call = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(call, ast.Call) and last_name(call.func) == "get_peft_model":
                named = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "peft_config")]
                alone = ast.Call(ast.Name("LoraConfig"), [], call.keywords)  # as unsloth has it
                found |= reader.lora(named[0] if named else ast.copy_location(alone, call), scope, script)
                if not named:  # unsloth's own default
                    found.setdefault("lora_target_modules", "all-linear")
            elif isinstance(call, ast.Call) and last_name(call.func) in CHATTY:
                found["model.chat_format"] = last_name(call.func)
            elif isinstance(call, ast.Call) and last_name(call.func) == "from_pretrained":
                if "Peft" in ast.unparse(call.func):
                    script.unread_statements.append(f"{UnreadableExpression(call)}: {ADAPTER}")
                for one in call.keywords:
                    if one.arg == "max_seq_length":  # unsloth's
                        with contextlib.suppress(*UNKNOWN):
                            found["vllm_max_model_length"] = reader.value(one.value, scope)
                            continue
                    if one.arg not in HOW_LOADED:
                        if one.arg not in HARMLESS["loaded"]:
                            found[f"from_pretrained.{one.arg}"] = ast.unparse(one.value)
                        continue
                    try:
                        value, around = reader.resolved(one.value, scope)
                        if one.arg == "quantization_config" and isinstance(value, ast.Call):
                            given = reader.arguments(value, around, script, "quantization_config.")
                            given |= _default_of_four_bits(value, given)
                            places = (
                                (key, key if key in HOW_LOADED else f"quantization_config.{key}") for key in given
                            )
                            found |= {place: given[key] for key, place in places}
                        else:
                            found[str(one.arg)] = reader.value(value, around)
                    except UNKNOWN as error:
                        script.unreadable[str(one.arg)] = str(error)
                if not last_name(getattr(call.func, "value", call.func)).startswith("Fast"):  # unsloth's are nf4
                    found |= _default_of_four_bits(call, found)
            node, scope = reader.resolved(origin, scope)
    return found


def _default_of_four_bits(call: ast.Call, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of four bits that transformers takes where a call that asks for them names none: not TRL's."""
    is_open = any(one.arg in (None, "bnb_4bit_quant_type", "quantization_config") for one in call.keywords)
    return {} if is_open or given.get("load_in_4bit") is not True else {"bnb_4bit_quant_type": FOUR_BITS}


def answer_of(reader: Values, call: ast.Call, scope: Scope, settings: Mapping[str, Any]) -> Any:
    """Return what one of these functions answers. `settings`: those of TRL's command line."""
    name = last_name(call.func)
    if name in ON_GPUS:
        return True
    if name == "getattr" and ast.unparse(call.args[0]) == "torch":
        return reader.value(call.args[1], scope)
    if ast.unparse(call.func) == "os.path.join":
        return str(PurePosixPath(*(str(reader.value(one, scope)) for one in call.args)))
    if name == "get_quantization_config" and not {"load_in_4bit", "load_in_8bit"} & set(settings):
        return None
    raise UnreadableExpression(call)


def changed(reader: Values, found: Any, node: ast.Name, scope: Scope) -> Any:
    """Return a dict or a list, which a name is bound to, with what the script changes in it before this use of the
    name: `settings["seed"] = 1`, `settings.update(...)`, `words.append(...)`. UnreadableExpression for a change that is
    not followed."""
    owner = scope
    while owner.outer is not None and all(one.name != node.id for one in owner.bound):
        owner = owner.outer
    end = node.lineno if owner is scope else sys.maxsize
    lines = [one.statement.lineno for one in owner.bound if one.name == node.id and one.statement.lineno < end]
    every = [one for one in owner.bound if one.name.startswith(f"{node.id}[")]
    every += [one for one in owner.changed if one.name == node.id]
    every = [one for one in every if max(lines, default=0) < one.statement.lineno < end]
    if node.id in scope.outermost().changed_by_functions:
        raise UnreadableExpression(node, "which a function changes")
    found = found.copy()
    for one in sorted(every, key=lambda one: one.statement.lineno):
        if (is_taken := one.is_known()) is None:
            raise UnreadableExpression(one.statement, "which a branch decides")
        if is_taken:
            _change(reader, found, one)
            reader.read_statements.add(id(one.statement))
    return found


def _change(reader: Values, found: Any, one: Binding) -> None:
    """Change a dict or a list as a statement does."""
    call = one.value if isinstance(one.value, ast.Call) and not one.name.endswith("]") else None
    if call is None:
        place = ast.parse(one.name, mode="eval").body
        if not isinstance(place, ast.Subscript) or not isinstance(place.value, ast.Name):
            raise UnreadableExpression(one.statement)
        found[reader.value(place.slice, one.scope)] = reader.value(one.value, one.scope)
        return
    method, given = last_name(call.func), [reader.value(each, one.scope) for each in call.args]
    words = {str(word.arg): reader.value(word.value, one.scope) for word in call.keywords}
    if method not in CHANGES[type(found)]:
        raise UnreadableExpression(one.statement)
    getattr(found, method)(*given, **words)


def refuse_own_words(trees: Sequence[ast.AST], node: ast.AST) -> None:
    """UnreadableExpression if the script itself gives its parser the command line, `parse_args(["--lr", "1e-5"])`."""
    for call in (one for tree in trees for one in ast.walk(tree)):
        is_parser = isinstance(call, ast.Call) and last_name(call.func) == "parse_args"
        words = ast.unparse(call.args[0]) if is_parser and isinstance(call, ast.Call) and call.args else "[]"
        if words not in NO_WORDS:
            raise UnreadableExpression(node, "whose command line is in the script")


def sampling_of(reader: Values, call: ast.Call, scope: Scope) -> dict[str, Any]:
    """Return the settings of sampling in unsloth's `vllm_sampling_params`."""
    found: dict[str, Any] = {}
    for one in call.keywords:
        if one.arg in SAMPLED:
            value = reader.value(one.value, scope)
            found[str(one.arg)] = 0 if one.arg == "top_k" and value == -1 else value
        else:
            found[f"vllm_sampling_params.{one.arg}"] = ast.unparse(one.value)
    return found


def made_of(node: ast.AST) -> ast.expr | None:
    """Return the model, or its name, that a call makes a model of. None for anything else."""
    call = node.value if isinstance(node, ast.Subscript) else node  # model, tokenizer = ...
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr in MOVES:
        return call.func.value
    names = [one.value for one in call.keywords if one.arg in ("model_name", "pretrained_model_name_or_path")]
    return next(iter([*call.args, *names]), None) if last_name(call.func) in MODELS else None


class ConfigFiles:
    """The files of settings that one script loads, for its ScriptReader."""

    def __init__(self, reader: Values, tree: ast.Module, folder: Path) -> None:
        self._reader, self._folder = reader, folder
        every = [one for one in ast.walk(tree) if isinstance(one, ast.With)]
        self._opened = [(one, item) for one in every for item in one.items if item.optional_vars is not None]
        self.read: set[Path] = set()

    def is_loaded(self, call: ast.Call) -> bool:
        """Return whether a call loads a config."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        return bool(call.args) and owner is not None and last_name(call.func) in LOADERS.get(last_name(owner), ())

    def load(self, call: ast.Call, scope: Scope) -> dict[str, Any]:
        """Return the settings in a file. UnreadableExpression if it is not there."""
        parts = list(self._parts(self._named(call.args[0]), scope))
        places = [self._folder.joinpath(*parts), Path(*parts)] if parts else []
        if (found := next((one for one in places if one.is_file()), None)) is None:
            raise UnreadableExpression(call, f"and {'/'.join(parts) or 'the file'} is not beside the script")
        self.read.add(found.resolve())
        return read_yaml(found, nested=True)

    def _named(self, node: ast.expr) -> ast.expr:
        """Return the path of a file that is open, or was read."""
        if isinstance(node, ast.Name):
            before = [
                item.context_expr
                for one, item in self._opened
                if ast.unparse(item.optional_vars or node) == node.id and one.lineno <= node.lineno
            ]
            return self._named(before[-1]) if before else node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open" and node.args:
            return node.args[0]
        owner = node.func if isinstance(node, ast.Call) else None
        is_read = isinstance(owner, ast.Attribute) and owner.attr in ("open", "read_text", "read_bytes", "read")
        return self._named(owner.value) if is_read and isinstance(owner, ast.Attribute) else node

    def _parts(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        """Yield the parts of a path, without those that say where the script lies."""
        try:
            node, scope = self._reader.resolved(node, scope)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                yield from self._parts(node.left, scope)
                yield from self._parts(node.right, scope)
            elif isinstance(node, ast.Call) and last_name(node.func) in ("Path", "join"):
                for one in node.args:
                    yield from self._parts(one, scope)
            else:
                yield str(self._reader.value(node, scope))
        except UNKNOWN:
            return
