"""Finds an answer in a text, reads it, and compares it with another one. `math`, `k12` and the rewards for pictures
share this package.

The modules, in the order in which an answer goes through them:

    boxes        finds the answer in a completion: the last box, what follows "the answer is", a short completion
    clean        normalises characters and LaTeX
    maths.words  reads numbers that are written in English or Chinese words
    maths.nodes  trees of expressions, and what an answer may be: a value, a group, a real set, a relation, ...
    maths.tokens  cuts an expression into tokens
    maths.expressions  reads the tokens as a tree
    scan         splits a text at separators outside of brackets
    reading      reads a whole answer, by what it looks like
    maths.realsets  unions of intervals, from intervals and from inequalities
    maths.values  evaluates trees: exactly if possible, and within limits
    compare      compares two answers: equal, different, or unknown
    maths.units  names of units in English and Chinese, and their sizes
    second       math-verify, used if our own readers cannot tell
    json_values  finds JSON in a text
    golds        problems with several right answers
    rectangles   reads boxes in pictures, and computes the overlap of two boxes
    assignment   the best matching of boxes
    maths.guards  refuses expressions whose evaluation would take too long
"""
