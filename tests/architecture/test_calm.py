"""Calm code: bounds on the branches of a function and on the share of names that say nothing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_COMPLEXITY = 20
EXCEPTIONS: dict[str, int] = {}
"""Function to its complexity: those beyond the bound that are still to be divided."""
NAMELESS = {
    "found", "given", "held", "kept", "known", "made", "one", "own", "seen", "shown", "some",
    "wanted",
}  # fmt: skip
MAX_NAMELESS_SHARE = 0.003
"""Bound on their share of all bindings."""


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """Path from the root to the syntax tree of each module."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "medseg").rglob("*.py"))
    }


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Qualified name and node of each function, those inside classes and functions too."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from functions(child, prefix)
            continue
        name = prefix + child.name
        if not isinstance(child, ast.ClassDef):
            yield name, child
        yield from functions(child, f"{name}.")


def branches(node: ast.AST) -> int:
    """Branches that a node adds to the function that holds it."""
    if isinstance(node, (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp)):
        return 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return 0


def complexity(function: ast.AST) -> int:
    """Ways through a function: its branches, also in expressions, without nested functions."""

    def below(node: ast.AST) -> int:
        children = [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        return sum(branches(child) + below(child) for child in children)

    return 1 + below(function)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names of the variables and parameters that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.arg):
            yield node.arg


def test_expressions_count_as_branches() -> None:
    source = "def f(a):\n  g = [b for b in a if b]\n  return 1 if a and g or b else 2"
    ((name, function),) = functions(ast.parse(source))
    # One way; the loop and the condition of the list; the choice; `and`; `or`.
    assert (name, complexity(function)) == ("f", 6)


def test_no_function_has_more_branches_than_a_reader_holds(modules: dict[str, ast.Module]) -> None:
    beyond = {}
    for path, tree in modules.items():
        for name, function in functions(tree):
            value = complexity(function)
            if value > MAX_COMPLEXITY:
                beyond[f"{path} {name}"] = value
    worse = {place: value for place, value in beyond.items() if value > EXCEPTIONS.get(place, 0)}
    assert worse == {}, "divide it into steps that have names"
    assert EXCEPTIONS.keys() <= beyond.keys(), "divided: take it out of EXCEPTIONS"


def test_names_say_what_the_value_is(modules: dict[str, ast.Module]) -> None:
    num_bindings = 0
    nameless: Counter[str] = Counter()
    for path, tree in modules.items():
        for name in bound_names(tree):
            num_bindings += 1
            nameless[path] += name in NAMELESS
    worst = ", ".join(f"{path} ({count})" for path, count in nameless.most_common(10))
    assert nameless.total() <= MAX_NAMELESS_SHARE * num_bindings, f"rename in {worst}"
