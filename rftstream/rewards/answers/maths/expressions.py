r"""Reads the tokens of an expression as a tree, by recursive descent.

    sum      = [+-±] product { (+|-|±) product }
    product  = factor { (* | / | nothing) factor }
    factor   = atom { ^ argument | ! }
    atom     = number | variable | ( sum ) | |sum| | \frac{}{} | \sqrt[]{} | function argument ...

`3\frac12` and `3 1/2` are mixed numbers. `1/2x` is (1/2)x, as LaTeX authors mean it.
"""

from __future__ import annotations

from fractions import Fraction

from rftstream.rewards.answers.maths.nodes import Tree, number, symbol
from rftstream.rewards.answers.maths.tokens import SYMBOL_COMMANDS, Token, Unreadable, cut

_FUNCTIONS = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp abs arccot arcsec arccsc arcsinh arccosh
arctanh floor ceil arg
"""
FUNCTIONS = {name: name for name in _FUNCTIONS.split()} | {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "arsinh": "arcsinh",
    "arcosh": "arccosh",
    "artanh": "arctanh",
    "Re": "re",
    "Im": "im",
}
"""Command of a function -> its name in trees."""
INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")}
_TIMES = ("times", "cdot", "ast", "bullet")
_MAX_DEPTH = 60
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_ENDS = (*_CLOSING.values(), "|")
_ALONE = {"pi": Tree("pi"), "infty": Tree("infinity")}
"""Commands without an argument."""
_FLOORS = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}
"""Command that opens brackets -> the command that closes them, and the function."""


def read_expression(text: str) -> Tree:
    """Return the tree of a cleaned expression. Unreadable if the text is no expression, or not completely one."""
    tokens = cut(text)
    if not tokens:
        raise Unreadable("nothing")
    reader = _ExpressionReader(tokens)
    node = reader.sum()
    if reader.place != len(tokens):
        raise Unreadable(f"what follows {tokens[reader.place].text!r}")
    return node


class _TokenCursor:
    """A position in a list of tokens, with readers that need no lookahead. `place` is the position."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self.place = 0

    def _sign(self) -> str | None:
        token = self._peek()
        sign = _sign_of(token)
        if sign is not None:
            self.place += 1
        return sign

    def _peek_sign(self) -> bool:
        return _sign_of(self._peek()) is not None

    def _peek(self, ahead: int = 0) -> Token | None:
        place = self.place + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def _take(self, kind: str) -> Token:
        token = self._peek()
        if token is None or token.kind != kind:
            raise Unreadable(f"{kind} is missing")
        self.place += 1
        return token

    def _one_digit(self, token: Token) -> Tree:
        r"""Read one digit of a number: `\frac12` has the arguments 1 and 2."""
        if not token.text.isdigit() or len(token.text) == 1:
            self.place += 1
            return number(token.number, rounded=token.rounded)
        rest = token.text[1:]
        self._tokens[self.place] = Token("number", rest, Fraction(rest))
        return number(int(token.text[0]))

    def _index_follows(self) -> bool:
        token = self._peek()
        return token is not None and token.kind == "_"

    def _index(self) -> str:
        token = self._peek()
        if token is None:
            raise Unreadable("an index is missing")
        self.place += 1
        if token.kind != "{":
            return token.text
        parts = []
        while (inner := self._peek()) is not None and inner.kind != "}":
            parts.append(inner.text)
            self.place += 1
        self._take("}")
        return "".join(parts)


class _ExpressionReader(_TokenCursor):
    """Reads one list of tokens. `sum` reads as far as possible; `place` is then the position where it stopped."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._depth = 0
        self._bars = 0
        self._functions = 0

    def sum(self) -> Tree:
        """Read a sum, up to a closing bracket or the end."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = self._term(first=True)
        while (sign := self._sign()) is not None:
            node = _signed_sum(node, sign, self._term(first=False))
        self._depth -= 1
        return node

    def _term(self, *, first: bool) -> Tree:
        sign = self._sign() if first else None
        if sign is None:
            return self._product()
        inner = self._term(first=True) if self._peek_sign() else self._product()
        if sign == "+":
            return inner
        if sign == "-":
            return Tree("neg", (inner,))
        return Tree("pm", (number(0), inner), name="+" if sign == "pm" else "-")

    def _product(self) -> Tree:
        node = self._factor()
        while True:
            token = self._peek()
            if token is None or (token.kind in _ENDS and not self._opens_bar(token)):
                return node
            if token.kind == "*" or (token.kind == "command" and token.text in _TIMES):
                self.place += 1
                node = Tree("mul", (node, self._signed_factor()))
            elif token.kind == "/" or (token.kind == "command" and token.text == "div"):
                self.place += 1
                node = Tree("div", (node, self._signed_factor()))
            elif _sign_of(token) is not None:
                return node
            else:
                node = self._juxtaposed(node, token)

    def _opens_bar(self, token: Token) -> bool:
        return token.kind == "|" and not self._bars

    def _signed_factor(self) -> Tree:
        sign = self._sign()
        if sign is None:
            return self._factor()
        if sign not in "+-":
            raise Unreadable("a plus-minus sign in a product")
        inner = self._factor()
        return inner if sign == "+" else Tree("neg", (inner,))

    def _juxtaposed(self, left: Tree, token: Token) -> Tree:
        before = self._tokens[self.place - 1]
        if token.kind == "number":
            mixed = self._mixed(left, before)
            if mixed is not None:
                return mixed
            if before.kind == "number" or left.op == "div":
                raise Unreadable("two numbers side by side")
        right = self._factor()
        whole = before.kind == "number" and left.op == "number" and not before.rounded
        if whole and token.kind == "command" and token.text == "frac" and _is_proper(right):
            return Tree("add", (left, right))
        return Tree("mul", (left, right))

    def _mixed(self, left: Tree, before: Token) -> Tree | None:
        """Read `3 1/2` as one number, if the next tokens have that form."""
        top, slash, bottom = self._peek(), self._peek(1), self._peek(2)
        if before.kind != "number" or left.op != "number" or before.rounded or not (top and slash and bottom):
            return None
        if slash.kind != "/" or bottom.kind != "number" or top.rounded or bottom.rounded:
            return None
        if not 0 <= top.number < bottom.number:
            raise Unreadable("no mixed number")
        after = self._peek(3)
        if after is not None and after.kind in ("number", "^", "!"):
            raise Unreadable("no mixed number")
        self.place += 3
        return number(left.number + top.number / bottom.number)

    def _factor(self) -> Tree:
        node = self._atom()
        while (token := self._peek()) is not None:
            if token.kind == "^":
                self.place += 1
                node = self._power(node)
            elif token.kind == "!":
                self.place += 1
                node = Tree("factorial", (node,))
            elif token.kind == "command" and token.text == "%":
                self.place += 1
                node = Tree("div", (node, number(100)))
            else:
                break
        return node

    def _power(self, base: Tree) -> Tree:
        token = self._peek()
        if token is not None and token.kind == "command" and token.text == "circ":
            self.place += 1
            return self._degrees(base)
        if token is not None and token.kind == "{" and (inner := self._peek(1)) and inner.text == "circ":
            self.place += 2
            self._take("}")
            return self._degrees(base)
        if token is not None and token.kind == "{" and (inner := self._peek(1)) and inner.text == "prime":
            raise Unreadable("a derivative")
        exponent = self._argument(signed=True)
        return Tree("pow", (base, exponent))

    def _degrees(self, node: Tree) -> Tree:
        r"""Return an angle in degrees: the number itself, or its size in radians inside `\sin` and the like."""
        if not self._functions:
            return node
        return Tree("mul", (node, Tree("div", (Tree("pi"), number(180)))))

    def _argument(self, *, signed: bool = False) -> Tree:
        """Read the argument of a command or of `^`: a group in braces, or a single digit or letter."""
        token = self._peek()
        if token is None:
            raise Unreadable("an argument is missing")
        if token.kind == "{":
            return self._bracketed("{")
        if token.kind == "number" and not signed:
            return self._one_digit(token)
        if signed and token.kind in "+-":
            self.place += 1
            inner = self._argument(signed=True)
            return inner if token.kind == "+" else Tree("neg", (inner,))
        node = self._atom()
        following = self._peek()
        if signed and following is not None and following.kind == "^":
            self.place += 1
            return self._power(node)
        return node

    def _bracketed(self, left: str) -> Tree:
        self._take(left)
        bars, self._bars = self._bars, 0
        node = self.sum()
        self._bars = bars
        self._take(_CLOSING[left])
        return node

    def _atom(self) -> Tree:
        token = self._peek()
        if token is None:
            raise Unreadable("it ends too early")
        if token.kind == "number":
            self.place += 1
            return number(token.number, rounded=token.rounded)
        if token.kind == "name":
            self.place += 1
            return self._variable(token.text)
        if token.kind in _CLOSING:
            return self._bracketed(token.kind)
        if token.kind == "|":
            self.place += 1
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._take("|")
            return Tree("abs", (node,))
        if token.kind == "command":
            return self._command(token.text)
        raise Unreadable(f"{token.text!r} begins no expression")

    def _variable(self, name: str) -> Tree:
        """Read a variable with its index and its primes."""
        if name in ("e", "i") and not self._index_follows():
            return Tree(name)
        if name == "C" and (combination := self._combination()) is not None:
            return combination
        while (token := self._peek()) is not None and token.kind in ("_", "'"):
            self.place += 1
            name += "'" if token.kind == "'" else "_" + self._index()
        return symbol(name)

    def _combination(self) -> Tree | None:
        """Read `C_{10}^{3}`, the number of combinations."""
        start = self.place
        try:
            self._take("_")
            top = self._argument()
            self._take("^")
            bottom = self._argument()
        except Unreadable:
            top = bottom = number(0)
        if top.op == bottom.op == "number" and 1 < top.number >= bottom.number:
            return Tree("binom", (top, bottom))
        self.place = start
        return None

    def _command(self, name: str) -> Tree:
        self.place += 1
        if name in _ALONE:
            return _ALONE[name]
        if name in ("frac", "binom"):
            return Tree("div" if name == "frac" else name, (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name == "cbrt":
            return Tree("root", (self._argument(), number(3)))
        if name in SYMBOL_COMMANDS:
            return self._variable(name)
        if name in _FLOORS:
            closing, kind = _FLOORS[name]
            node = self.sum()
            if self._take("command").text != closing:
                raise Unreadable("a bracket is not closed")
            return Tree(kind, (node,))
        if name == "dollar":
            return self._atom()
        if name in FUNCTIONS:
            return self._function(FUNCTIONS[name])
        if name in ("overline", "bar", "hat", "vec", "mathbf", "mathcal", "mathbb"):
            token = self._peek()
            if token is not None and token.kind == "{":
                return symbol(f"{name} {self._index()}")
        raise Unreadable(f"\\{name}")

    def _root(self) -> Tree:
        index = number(2)
        token = self._peek()
        if token is not None and token.kind == "[":
            index = self._bracketed("[")
        token = self._peek()
        if token is not None and token.kind == "(":
            return Tree("root", (self._bracketed("("), index))
        return Tree("root", (self._argument(), index))

    def _function(self, name: str) -> Tree:
        base: Tree | None = None
        power: Tree | None = None
        while (token := self._peek()) is not None and token.kind in ("^", "_"):
            self.place += 1
            if token.kind == "_":
                base = self._argument()
            else:
                power = self._argument(signed=True)
        self._functions += 1
        argument = self._function_argument()
        self._functions -= 1
        if base is not None and name != "log":
            raise Unreadable("an index of a function")
        if base is not None or name == "lg":
            node = Tree("log", (argument, number(10) if base is None else base))
        elif name == "log":
            node = Tree("ln", (argument,), name="log")
        else:
            node = Tree(name, (argument,))
        if power is None:
            return node
        if name in INVERSES and power == Tree("neg", (number(1),)):
            return Tree(INVERSES[name], (argument,))
        return Tree("pow", (node, power))

    def _function_argument(self) -> Tree:
        r"""Read the argument of a function: brackets, or adjacent factors up to the next function: `\sin 2x`."""
        token = self._peek()
        if token is None:
            raise Unreadable("the argument of a function is missing")
        if token.kind in _CLOSING:
            node = self._bracketed(token.kind)
            while (after := self._peek()) is not None and after.kind == "^" and token.kind == "{":
                self.place += 1
                node = self._power(node)
            return node
        if (sign := self._sign()) is not None and sign == "-":
            return Tree("neg", (self._function_argument(),))
        node = self._factor()
        while (token := self._peek()) is not None:
            simple = token.kind in ("name", "number") or (
                token.kind == "command" and (token.text in SYMBOL_COMMANDS or token.text in ("pi", "frac", "sqrt"))
            )
            slash = token.kind == "/" and (after := self._peek(1)) is not None and after.kind == "number"
            if slash:
                self.place += 1
                node = Tree("div", (node, self._factor()))
            elif simple:
                node = Tree("mul", (node, self._factor()))
            else:
                break
        return node


def _sign_of(token: Token | None) -> str | None:
    if token is None:
        return None
    if token.kind in ("+", "-"):
        return token.kind
    return token.text if token.kind == "command" and token.text in ("pm", "mp") else None


def _signed_sum(left: Tree, sign: str, right: Tree) -> Tree:
    if sign == "+":
        return Tree("add", (left, right))
    if sign == "-":
        return Tree("add", (left, Tree("neg", (right,))))
    return Tree("pm", (left, right), name="+" if sign == "pm" else "-")


def _is_proper(node: Tree) -> bool:
    """Return whether a tree is a fraction of whole numbers below 1."""
    if node.op != "div" or any(part.op != "number" for part in node.parts):
        return False
    top, bottom = (part.number for part in node.parts)
    return bool(0 <= top < bottom) and top.denominator == bottom.denominator == 1
