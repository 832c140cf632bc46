"""A radix tree over token sequences, which finds the longest beginning that a prompt has in common with one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Kept = TypeVar("Kept")
Tokens = tuple[int, ...]


class PrefixTree(Generic[Kept]):
    """Sequences of tokens, each with a value. `TurnStore` makes it. A sequence that begins as others do shares their
    nodes, so a search reads each token of the prompt once, however many sequences there are."""

    def __init__(self) -> None:
        self._root: _Node[Kept] = _Node((), None)

    def add(self, tokens: Sequence[int], value: Kept) -> None:
        """Add a sequence; it replaces an equal one."""
        rest, node = tuple(tokens), self._root
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                node.children[rest[0]] = _Node(rest, value)
                return
            shared = _num_shared(child.tokens, rest)
            if shared < len(child.tokens):
                upper: _Node[Kept] = _Node(child.tokens[:shared], None)
                child.tokens = child.tokens[shared:]
                upper.children[child.tokens[0]] = child
                node.children[rest[0]] = child = upper
            node, rest = child, rest[shared:]
        node.value = value

    def remove(self, tokens: Sequence[int], value: Kept) -> None:
        """Remove a sequence if it has this value."""
        rest, path = tuple(tokens), [self._root]
        while rest:
            child = path[-1].children.get(rest[0])
            if child is None or rest[: len(child.tokens)] != child.tokens:
                return
            path.append(child)
            rest = rest[len(child.tokens) :]
        if path[-1].value is not value:
            return
        path[-1].value = None
        for parent, node in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
            if node.value is None and not node.children:
                del parent.children[node.tokens[0]]
            elif node.value is None and len(node.children) == 1:
                [child] = node.children.values()
                child.tokens = node.tokens + child.tokens
                parent.children[child.tokens[0]] = child

    def whole(self, prompt: Tokens) -> list[tuple[int, Kept]]:
        """Return the sequences that a prompt begins with, longest first: their lengths and values."""
        *path, _ = self._path(prompt)
        found = [(end, node.value) for end, node, _ in path if node.value is not None]
        return found[::-1]

    def deepest(self, prompt: Tokens) -> tuple[int, list[Kept]]:
        """Return how many tokens at the beginning of a prompt a sequence has, too, and the values of those that have
        them all."""
        *_, (end, node, _) = self._path(prompt)
        return end, [] if node is self._root else list(_values(node))

    def _path(self, prompt: Tokens) -> Iterator[tuple[int, _Node[Kept], bool]]:
        """Yield the nodes that a prompt passes: the number of its tokens up to there, the node, and whether the node's
        tokens are all among them. The last one is yielded twice, at last as the deepest."""
        node, end, is_whole = self._root, 0, True
        while True:
            if is_whole:
                yield end, node, True
            child = node.children.get(prompt[end]) if is_whole and end < len(prompt) else None
            if child is None:
                yield end, node, is_whole
                return
            shared = _num_shared(child.tokens, prompt[end : end + len(child.tokens)])
            node, end, is_whole = child, end + shared, shared == len(child.tokens)


class _Node(Generic[Kept]):
    """The tokens between two branches, and the value of the sequence that ends behind them, if one does."""

    __slots__ = ("children", "tokens", "value")

    def __init__(self, tokens: Tokens, value: Kept | None) -> None:
        self.tokens, self.value = tokens, value
        self.children: dict[int, _Node[Kept]] = {}


def _values(node: _Node[Kept]) -> Iterator[Kept]:
    if node.value is not None:
        yield node.value
    for child in node.children.values():
        yield from _values(child)


def _num_shared(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    least = 0
    while least < most - 1:  # they differ at or before `most`
        middle = (least + most) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle
    return least
