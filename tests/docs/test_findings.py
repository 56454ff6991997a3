"""Codes of findings: their page has every code that the package uses, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import medseg
from medseg.data.audit.finding import KINDS

PACKAGE = Path(medseg.__file__).parent
PAGE = PACKAGE.parent / "docs" / "findings.md"
MAKERS = {"warnings_of", "information_of"}


def codes_in_use() -> Iterator[str]:
    """Codes that are given to the functions that make findings."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in MAKERS
            ):
                code = node.args[0]
                assert isinstance(code, ast.Constant), (
                    f"{path}: a code is written out, so that it can be found"
                )
                yield str(code.value)


def test_the_page_has_all_codes_of_a_result() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Codes")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(documented) == sorted(set(codes_in_use()))
    named = set(re.findall(r"`(\w+)`", section.partition("|")[0]))
    assert named <= {kind.partition(":")[0] for kind in KINDS}
