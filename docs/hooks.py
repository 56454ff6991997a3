"""MkDocs hooks: pages made of files elsewhere in the repository, notebooks of the examples, and the list of all keys."""

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
# File of the repository to its page; the files of docs/ are pages anyway.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "medseg/weights/README.md": "model_card.md",
    **{
        f"medseg/{package}/README.md": f"decisions/{package.replace('/', '_')}.md"
        for path in sorted(ROOT.glob("medseg/**/README.md"))
        if (package := path.parent.relative_to(ROOT / "medseg").as_posix()) != "weights"
    },
    **{f"examples/{path.name}": f"notebooks/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.py"))},
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
# Commands whose keys are listed; the others take the keys of `train` and a few of their own.
COMMANDS = ("train", "predict", "evaluate", "export", "import")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, page in PAGES.items():
        if not source.endswith(".py"):
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
            continue
        notebook = jupytext.read(ROOT / source, fmt="py:percent")
        name = Path(page).stem
        files.append(
            File.generated(config, page, content=f"{notebook_page(notebook)}\n\n[Download as a notebook]({name}.ipynb)\n")
        )
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=jupytext.writes(notebook, fmt="ipynb")))
    files.append(File.generated(config, "keys.md", content=keys_page()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Point links between files of the repository to their pages; a link to a file without a page loses its target."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        found = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(found) is not None:
            return posixpath.relpath(found, here or ".") + (match[2] or "")
        if files.get_file_from_path(posixpath.normpath(posixpath.join(here, match[1]))) is not None:
            return match[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: the link to {match[1]} leads nowhere")
        return ""

    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", LINK.sub(target, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in tables break after their signs, so that columns stay narrow."""
    return re.sub(r"(?<!</span>)(?<=<code>)[^<]+", lambda text: re.sub(r"([_.=/,])(?=\w)", r"\1<wbr>", text[0]), html)


def notebook_page(notebook: NotebookNode) -> str:
    """Write the cells of a notebook as Markdown."""
    return "\n\n".join(
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in notebook.cells
        if cell.source
    )


def keys_page() -> str:
    """List every key of the main commands, as `medseg <command> --help` prints it."""
    lines = [
        "# Every key",
        "",
        "The keys of the main commands with their default, type, range and meaning, as `medseg <command> --help` prints them. Commands that are not listed take the keys of",
        "`train` and a few of their own.",
    ]
    for command in COMMANDS:
        arguments = [sys.executable, "-m", "medseg.commands.cli", command, "--help"]
        printed = subprocess.run(arguments, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout
        lines += ["", f"## medseg {command}", "", "```text", *printed.splitlines(), "```"]
    return "\n".join(lines)
