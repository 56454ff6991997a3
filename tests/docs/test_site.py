"""The documentation site builds without a warning, has no dead links, and loads nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from medseg.commands.entry import COMMANDS, compose
from medseg.config.help import list_keys
from medseg.training.options import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
# Attributes that a browser follows by itself.
LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
}


class Links(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if given.get("rel") not in ("canonical", "alternate"):
            self.loaded += [value for name, value in given.items() if (tag, name) in LOADED]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra medseg[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, page in pages.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, f"{path.name} loads {link}"
        if path.name == "404.html":  # its links start at the root of the server
            continue
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, (
                    f"{path.relative_to(site)}: {link}"
                )
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), (
            style.name
        )


@pytest.mark.slow
def test_no_markdown_is_left_in_the_pages(site: Path) -> None:
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        assert html.count("<code") == html.count("</code>"), path.name
        body = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
        text = re.sub(r"<[^>]+>", "", body)
        left = re.findall(
            r"^\s*\|.*\|\s*$|^\s*\* .*|\]\([^)]*\)|\*\*\w[^*]*\*\*|`[^`\n]+`", text, re.MULTILINE
        )
        assert not left, f"{path.relative_to(site)}: {left[:3]}"


class CodeBlocks(HTMLParser):
    """Text of each code block of a page, and the tags inside them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.depth = 0
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "pre":
            self.depth += 1
            self.texts.append("")
        elif self.depth:
            self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "pre"

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.texts[-1] += data


@pytest.mark.slow
def test_a_code_block_is_what_its_source_says(site: Path) -> None:
    """What is copied from a page can be pasted."""
    num_blocks = 0
    for source in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        name = "index.html" if source.name == "README.md" else f"{source.stem}/index.html"
        page = CodeBlocks((site / name).read_text(encoding="utf-8"))
        assert page.tags <= {"code", "span", "a"}, f"{name}: {page.tags}"
        text = "\n".join(line.strip() for line in source.read_text(encoding="utf-8").splitlines())
        for block in page.texts:
            if source.name != "api.md":  # signatures are made from the code
                lines = "\n".join(line.strip() for line in block.strip().splitlines())
                assert lines in text, f"{name}: {block}"
                num_blocks += 1
    assert num_blocks >= 100


@pytest.mark.slow
def test_every_key_of_every_command_has_an_anchor(site: Path) -> None:
    page = Links((site / "keys" / "index.html").read_text(encoding="utf-8"))
    trained = {entry.name for entry in list_keys(TrainConfig, *compose("train"))}
    for command, (schema, *_) in COMMANDS.items():
        assert command in page.anchors
        names = {entry.name for entry in list_keys(schema, *compose(command))}
        own = names - trained if issubclass(schema, TrainConfig) and command != "train" else names
        missing = {f"{command}.{name}" for name in own} - page.anchors
        assert not missing


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
