"""Statements of a training script of TRL that have a say in its training, and that no rule reads.

Rules read what the trainer is made of. A script can do more with it: freeze weights, patch a method, add a callback. A
statement that touches the trainer, its model, its settings or its data is left to the user, unless it is known to
leave the training as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence

from rftstream.integrations.foreign_configs.reading import tables_of
from rftstream.integrations.foreign_configs.trl.scripts.rows import UNCHANGED
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    DEFINITIONS,
    UNKNOWN,
    UnreadableExpression,
    last_name,
    root_name,
    shown,
)

HARMLESS = {name: frozenset(words.split()) for name, words in tables_of("trl")["harmless"].items()}
"""Functions and methods, settings, and arguments of a loaded model that leave the training as it is."""
BY_HAND = "nothing here reads this; if the training depends on it, it is to be set by hand"
TEMPLATE = "the template of a run is model.chat_template, a file or a text; without it, the model's own"
JUDGED = 'its judge can be the reward "judge" of grpo or rloo (docs/rewards.md)'
ELSEWHERE = {
    **dict.fromkeys(("KTO", "ORPO", "CPO", "BCO"), "dpo learns from preferences, in pairs (docs/data.md)"),
    **dict.fromkeys(("OnlineDPO", "NashMD", "XPO"), JUDGED),
    "PRM": "no reward of each step is trained; reward_model learns from pairs (docs/data.md)",
    **dict.fromkeys(("GKD", "MiniLLM"), "opd distils a teacher (docs/algorithms.md)"),
    "PPO": "ppo, with a critic, is set by hand (docs/algorithms.md)",
}
"""Trainers without a counterpart -> what comes next to them."""
PATCHED = ("trl", "transformers", "peft")
"""Packages whose own parts a script may replace."""


def unread_statements(
    bodies: Sequence[Sequence[ast.stmt]],
    trainer: ast.Call,
    functions: dict[str, ast.FunctionDef],
    read: Collection[int],
) -> list[ast.stmt]:
    """Return the statements in these bodies, and in the script's functions that they make values with, in the order of
    lines. `read`: the ids of statements that a rule has read."""
    names = _names_in(trainer)
    makers = {name for name, one in functions.items() if any(part is trainer for part in ast.walk(one))}
    found: dict[int, ast.stmt] = {}
    waiting, seen = [(body, names) for body in bodies], {one.lineno for body in bodies for one in body[:1]}
    while waiting:
        body, wanted = waiting.pop()
        statements = list(_statements(_until_trained(body)))
        touched = _touched(statements, wanted, trainer, makers)
        matter = (
            one
            for one in statements
            if (_matters(one, touched, functions) or _wraps(one, statements, trainer)) and id(one) not in read
        )
        found |= {id(one): one for one in matter if getattr(one, "value", None) is not trainer}
        for call in (called for one in statements for called in _makers(one, touched)):
            made = functions.get(last_name(call.func)) if _is_own(call.func) else None
            if made is not None and made.body[0].lineno not in seen:
                seen.add(made.body[0].lineno)
                returned = [one for one in ast.walk(made) if isinstance(one, ast.Return)]
                used = {name for one in returned for name in _names_in(one)}
                waiting.append((made.body, used | _parameters(made, call, touched)))
    return sorted(found.values(), key=lambda one: one.lineno)


def passed_over(bodies: Sequence[Sequence[ast.stmt]], holds: Callable[[ast.expr], bool]) -> set[int]:
    """Return the ids of statements in branches that the script does not take, as far as their conditions are known."""
    found: set[int] = set()
    for node in (one for body in bodies for one in _statements(body) if isinstance(one, ast.If)):
        try:
            branch = node.orelse if holds(node.test) else node.body
        except UNKNOWN:
            continue
        found |= {id(one) for one in _statements(branch)}
    return found


def bodies_around(tree: ast.Module, body: list[ast.stmt]) -> list[list[ast.stmt]]:
    """Return the bodies that lead to one of a script: the script's, and of a method that of `__init__`."""
    found = [tree.body]
    for one in (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)):
        methods = [each for each in one.body if isinstance(each, ast.FunctionDef)]
        if any(each.body is body for each in methods):
            found += [each.body for each in methods if each.name == "__init__" and each.body is not body]
    return [*found, *([body] if body is not tree.body else [])]


def to_do_about(node: ast.AST) -> str:
    """Return what the user is told about a statement that no rule reads."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    sets_template = any(isinstance(one, ast.Attribute) and one.attr == "chat_template" for one in targets)
    return f"{UnreadableExpression(node)}: {TEMPLATE if sets_template else BY_HAND}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and of its branches, without those that define something."""
    for node in body:
        if isinstance(node, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
            continue
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            for one in getattr(node, part, ()):
                yield from _statements([one] if isinstance(one, ast.stmt) else one.body)


def _until_trained(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """Return a body without what comes after the training."""
    ends = [
        place
        for place, one in enumerate(body)
        if not isinstance(one, DEFINITIONS)
        for call in _walked(one)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "train"
        if not ast.unparse(call.func.value).endswith("model")  # model.train() sets its mode
    ]
    return body[: ends[-1] + 1] if ends else body


def _touched(statements: Sequence[ast.stmt], wanted: set[str], trainer: ast.Call, makers: set[str]) -> set[str]:
    """Return the names that stand for the trainer, which the functions `makers` make, for something that it gets, or
    for a part of it."""
    pairs = [pair for one in statements for pair in _bound(one)]
    bound = {name for name, _ in pairs}
    touched = set(wanted) | {name for name, value in pairs if any(one is trainer for one in ast.walk(value))}
    touched |= {name for name, value in pairs if isinstance(value, ast.Call) and last_name(value.func) in makers}
    while True:
        new = {used for name, value in pairs if name in touched for used in _names_in(value) if used in bound}
        new |= {name for name, value in pairs if root_name(value) in touched and not _is_result(value)}
        if new <= touched:
            return touched
        touched |= new


def _is_result(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in ("train", "evaluate", "predict")


def _bound(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield names that a statement binds, with their values; a loop binds a part of what it goes through."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For):
        source = node.iter.func if isinstance(node.iter, ast.Call) else node.iter
        pairs = [(node.target, source)]
    else:
        pairs = []
    for target, value in pairs:
        yield from ((one.id, value) for one in _parts(target) if isinstance(one, ast.Name))


def _matters(node: ast.stmt, touched: set[str], functions: Collection[str]) -> bool:
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        if isinstance(value := node.value, ast.Call) and last_name(value.func) in UNCHANGED:
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [one for target in targets for one in _parts(target) if isinstance(one, (ast.Attribute, ast.Subscript))]
        parts = [one for one in parts if not _is_own(one)]
        return any(
            (root_name(one) in touched or _is_patched(one) or _of_vars(one) in touched)
            and (not isinstance(one, ast.Attribute) or one.attr not in HARMLESS["set"])
            for one in parts
        )
    if not isinstance(node, ast.Expr) or not isinstance(call := node.value, ast.Call):
        return False
    name = last_name(call.func)
    given = [*call.args, *(one.value for one in call.keywords)]
    if name in HARMLESS["calls"] or (_is_own(call.func) and name in functions):  # whose body is looked at
        return False
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return root_name(owner) in touched or any(root_name(one) in touched for one in given)


def _wraps(node: ast.stmt, statements: Sequence[ast.stmt], trainer: ast.Call) -> bool:
    """Return whether a statement puts what a call makes of the trainer in its place: `trainer = changed(trainer)`."""
    if not isinstance(node, ast.Assign) or not isinstance(call := node.value, ast.Call) or call is trainer:
        return False
    made = {name for one in statements for name, value in _bound(one) if value is trainer}
    return bool(made & {root_name(one) for one in node.targets}) and bool(made & _names_in(call))


def _of_vars(node: ast.expr) -> str:
    """Return the name in `vars(name)["seed"]`, or nothing."""
    call = node.value if isinstance(node, ast.Subscript) else None
    of = call.args[0] if isinstance(call, ast.Call) and last_name(call.func) == "vars" and call.args else None
    return root_name(of)


def _is_own(node: ast.expr) -> bool:
    """Return whether this is a name, or one of the object whose method runs."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")


def _is_patched(node: ast.expr) -> bool:
    """Return whether a part of a library is replaced, such as GRPOTrainer.compute_loss."""
    root = root_name(node)
    return root in PATCHED or root.endswith("Trainer")


def _makers(node: ast.stmt, touched: set[str]) -> Iterator[ast.Call]:
    """Yield the calls in a statement that make a value that the trainer gets, or that train with it."""
    values = [value for name, value in _bound(node) if name in touched]
    values += [node.value] if isinstance(node, ast.Expr) else []
    for value in values:
        yield from (one for one in _walked(value) if isinstance(one, ast.Call))


def _parameters(function: ast.FunctionDef, call: ast.Call, touched: set[str]) -> set[str]:
    """Return the parameters of a function that get something touched."""
    names = [one.arg for one in function.args.args if one.arg != "self"]
    given = [*zip(names, call.args, strict=False), *((one.arg or "", one.value) for one in call.keywords)]
    own = {"self"} if isinstance(call.func, ast.Attribute) else set()
    return own | {name for name, value in given if root_name(value) in touched}


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, without functions, which run later."""
    yield node
    for one in ast.iter_child_nodes(node):
        if not isinstance(one, ast.Lambda):
            yield from _walked(one)


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in _walked(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _parts(target: ast.expr) -> list[ast.expr]:
    """Return what a target of an assignment consists of."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [part for one in target.elts for part in _parts(one)]
    return [target]


def is_message(node: ast.AST) -> bool:
    """Return whether a dict in the script is a message, so that its prompts are lists of messages."""
    return isinstance(node, ast.Dict) and any(
        isinstance(key, ast.Constant) and key.value == "role" for key in node.keys
    )


def column_of_images(nodes: Collection[ast.AST]) -> str:
    """Return the column of images, as TRL calls it, if a message in the script shows one; else nothing."""
    parts = (zip(one.keys, one.values, strict=True) for one in nodes if isinstance(one, ast.Dict))
    said = {(ast.unparse(key), ast.unparse(value)) for one in parts for key, value in one if key is not None}
    if ("'type'", "'image'") not in said:
        return ""
    texts = {one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return "images" if "images" in texts else "image"


def take_first_turns(tree: ast.Module) -> list[str]:
    """Put the first turn in the place of each loop that makes trainers. Return what is to do about the others."""
    taken = _FirstTurns()
    taken.visit(tree)
    return taken.to_do


class _FirstTurns(ast.NodeTransformer):
    def __init__(self) -> None:
        self.to_do: list[str] = []

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        calls = (last_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
        if not any(name.endswith("Trainer") for name in calls):
            return node
        self.generic_visit(node)
        first = ast.Subscript(node.iter, ast.Constant(0), ast.Load())
        turn = ast.Assign([node.target], first)
        for made in (turn, first, first.slice):
            ast.copy_location(made, node.iter)
        for one in _leaving(node.body):
            self.to_do.append(f"{UnreadableExpression(one)}: the run is of a first turn that does not leave here")
        if node.orelse:
            self.to_do.append(f"{UnreadableExpression(node.orelse[0])}: it runs after the turns of a loop; {BY_HAND}")
        if isinstance(node.body[-1], ast.Break):
            return [turn, *node.body]
        self.to_do.append(
            f"line {node.lineno}: for {ast.unparse(node.target)} in {shown(node.iter)}: the run is that of the first "
            "turn; make one of each other turn, by --set or a copy of the run file"
        )
        return [turn, *node.body]

    def visit_While(self, node: ast.While) -> ast.AST:
        calls = (last_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
        if any(name.endswith("Trainer") for name in calls):
            self.to_do.append(f"line {node.lineno}: while {shown(node.test)}: trains in turns; the run is one of them")
        return node


def _leaving(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements on whose condition a turn of a loop ends before its end."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inside = [*node.body, *getattr(node, "orelse", ())]
            if any(isinstance(one, (ast.Break, ast.Continue)) for one in inside):
                yield node
            yield from _leaving(inside)
