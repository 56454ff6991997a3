"""The table of rules lists each threshold of the module once, as the documentation does."""

from __future__ import annotations

from pathlib import Path

from medseg.anatomy import rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"


def test_each_threshold_is_one_row() -> None:
    values = {
        name.lower(): value
        for name, value in vars(rules).items()
        if isinstance(value, (int, float, tuple))
    }
    thresholds = {name: value for name, value in values.items() if name != "rules"}
    assert len(rules.RULES) == len(thresholds)
    assert {rule.code: rule.value for rule in rules.RULES} == thresholds


def test_the_page_has_the_table() -> None:
    advice = "run `python -m medseg.anatomy.rules` and put what it prints into docs/rules.md"
    assert rules.markdown_table() in PAGE.read_text(encoding="utf-8"), advice


def test_no_other_module_of_anatomy_has_a_bound_of_its_own() -> None:
    """Constants of work, such as slabs, and sentences are no bounds.

    Those of the painter describe the disease of training samples: no result depends on them.
    """
    works = {"MEDIAN_STEP", "SLAB_PLANES", "UPSIDE_DOWN_SIGN"}
    own = set()
    for path in Path(rules.__file__).parent.glob("*.py"):
        if path.name in ("rules.py", "disease.py"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            name = line.split(" =")[0].split(":")[0]
            if " =" in line and name.isupper():
                own.add(name)
    assert own <= works
