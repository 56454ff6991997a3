"""Pages of the documentation: short, narrow, and decisions listed on their index."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from medseg.anatomy import rules

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("medseg/**/README.md")])
MAX_WORDS = 1200
MAX_COLUMNS = 120
# Rows that `python -m medseg.anatomy.rules` prints.
GENERATED = set(rules.markdown_table().splitlines())
# Pages that lead from a first result to a cluster, each to the next one.
WAY = [
    "first_lungs",
    "predict",
    "first_results",
    "data",
    "training",
    "extending",
    "memory",
    "cluster",
]
SECTION = re.compile(r"^## Decision: (.+)\n\n\* \*\*(\d{4}-\d\d-\d\d)", re.MULTILINE)
LINE = re.compile(r"^\* (\d{4}-\d\d-\d\d): (.+)\n  \(\[why\]\(\.\./(\S+)#(\S+)\)\)$", re.MULTILINE)


# Paths of the repository in code, and the names of its modules.
PATH = re.compile(r"(?<![\w/.<-])(?:medseg|conf|tests|benchmarks|docs|scripts|examples)/[\w/.-]+")
FOLDERS = ("medseg", "conf", "docs", "benchmarks", "examples", "scripts", "tests")
MODULES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {
    "train.py",
    "torch.py",  # of a user, in an example
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchor(heading: str) -> str:
    """Anchor of a heading, as the site and code hosts make it."""
    words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short_and_narrow(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= MAX_WORDS
    wide = [line for line in text.splitlines() if len(line) > MAX_COLUMNS and line not in GENERATED]
    assert not wide


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_holds_no_marks_of_an_unfinished_merge(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.match(r"<{7} |={7}$|>{7} ", line)]


def test_each_decision_of_a_package_is_on_the_index() -> None:
    decisions = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        sections = SECTION.findall(text)
        assert len(sections) == len(re.findall(r"^#+ Decision\b", text, re.MULTILINE)), (
            f"{name_of(page)}: a decision is `## Decision: …`, and its first line begins with "
            "a date"
        )
        decisions |= {
            (date, heading, name_of(page), anchor(f"Decision: {heading}"))
            for heading, date in sections
        }
    assert len(decisions) > 40
    index = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    assert set(LINE.findall(index)) == decisions


def test_each_page_of_the_way_names_the_next_one() -> None:
    for name, following in itertools.pairwise(WAY):
        last_line = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").rstrip()
        last_paragraph = last_line.rpartition("\n\n")[2]
        assert last_paragraph.startswith("Next: "), name
        assert f"]({following}.md)" in last_paragraph, name


def test_the_figure_of_the_packages_has_every_package() -> None:
    figure = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r'font-weight="600" fill="#fff"[^>]*>([\w ]+)<', figure))
    packages = {path.parent.name for path in (ROOT / "medseg").glob("*/__init__.py")}
    assert drawn == packages | {"ground floor"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of
)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    codes = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    for path in re.findall(PATH, " ".join(codes)):
        assert (ROOT / path.rstrip(".")).exists(), path
    modules = {code for code in codes if re.fullmatch(r"[\w/]+\.py", code)}
    assert {Path(module).name for module in modules} <= MODULES
