"""How a training script of TRL loads its model: data type, four bits, adapter, and the name at the end of the calls."""

from __future__ import annotations

import ast
import contextlib
from typing import Any, Protocol

from rftstream.integrations.foreign_configs.trl.maps import Values
from rftstream.integrations.foreign_configs.trl.modules import Script
from rftstream.integrations.foreign_configs.trl.rest import HARMLESS
from rftstream.integrations.foreign_configs.trl.scopes import UNKNOWN, Scope, last_name

HOW_LOADED = ("torch_dtype", "dtype", "load_in_4bit", "load_in_8bit", "quantization_config")
MOVES = ("to", "cuda", "cpu", "eval", "train", "half", "bfloat16", "float")
"""Methods that return the model that they are called on."""
CHATTY = ("setup_chat_format", "clone_chat_template")
"""Functions of TRL that give another chat template to a model."""
PREPARED = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
MODELS = ("from_pretrained", "get_peft_model", "create_reference_model", "deepcopy", *PREPARED, *CHATTY)
"""Calls whose first argument says which model they return."""


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
            elif isinstance(call, ast.Call) and last_name(call.func) in CHATTY:
                found["model.chat_format"] = last_name(call.func)
            elif isinstance(call, ast.Call) and last_name(call.func) == "from_pretrained":
                for one in call.keywords:
                    if one.arg not in HOW_LOADED:
                        if one.arg not in HARMLESS["loaded"]:
                            found[f"from_pretrained.{one.arg}"] = ast.unparse(one.value)
                        continue
                    try:
                        value, around = reader.resolved(one.value, scope)
                        if one.arg == "quantization_config" and isinstance(value, ast.Call):
                            given = reader.arguments(value, around, script, "quantization_config.")
                            places = (
                                (key, key if key in HOW_LOADED else f"quantization_config.{key}") for key in given
                            )
                            found |= {place: given[key] for key, place in places}
                        else:
                            found[str(one.arg)] = reader.value(value, around)
                    except UNKNOWN as error:
                        script.unreadable[str(one.arg)] = str(error)
            node, scope = reader.resolved(origin, scope)
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
