"""MkDocs hooks: pages made of files elsewhere, notebooks of the examples, and the list of all keys."""

import posixpath
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbformat import NotebookNode

from medseg.commands.entry import COMMANDS, compose
from medseg.config.help import Group, Key, list_keys, value_text
from medseg.training.options import TrainConfig

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
    **{
        f"examples/{path.name}": f"notebooks/{path.stem}.md"
        for path in sorted(ROOT.glob("examples/*.py"))
    },
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
# A code block, whose text is copied and must stay what the source says.
PRE = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
INLINE_CODE = re.compile(r"(?<=<code>)[^<]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, page in PAGES.items():
        if not source.endswith(".py"):
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
            continue
        notebook = jupytext.read(ROOT / source, fmt="py:percent")
        name = Path(page).stem
        files.append(
            File.generated(
                config,
                page,
                content=f"{notebook_page(notebook)}\n\n[Download as a notebook]({name}.ipynb)\n",
            )
        )
        files.append(
            File.generated(
                config, f"notebooks/{name}.ipynb", content=jupytext.writes(notebook, fmt="ipynb")
            )
        )
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
    """Let long names in tables break after their signs, so that columns stay narrow; code blocks stay as written."""
    parts = PRE.split(html)
    parts[::2] = [
        INLINE_CODE.sub(_breakable, part) for part in parts[::2]
    ]  # the odd ones are code blocks
    return "".join(parts)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"([_.=/,])(?=\w)", r"\1<wbr>", code[0])


def notebook_page(notebook: NotebookNode) -> str:
    """Write the cells of a notebook as Markdown."""
    return "\n\n".join(
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in notebook.cells
        if cell.source
    )


def keys_page() -> str:
    """Write a table of the keys of each command, with an anchor `<command>.<key>` for each."""
    trained, groups = compose("train")
    shared = {entry.name: _row_cells(entry) for entry in list_keys(TrainConfig, trained, groups)}
    lines = [
        "# Every key",
        "",
        "Type a key as `key=value`; `medseg <command> --help` prints the same with the current values. "
        "A row can be linked: its name is the link. `???` must be given.",
    ]
    for command, (schema, _, sentence) in COMMANDS.items():
        entries = list(list_keys(schema, *compose(command)))
        lines += [
            "",
            f"## medseg {command} {{ #{command} }}",
            "",
            f"{sentence[0].upper()}{sentence[1:]}.",
        ]
        if issubclass(schema, TrainConfig) and schema is not TrainConfig:
            lines += [
                "",
                "It takes [every key of `train`](#train) too; these are its own, or have another default:",
            ]
            entries = [entry for entry in entries if shared.get(entry.name) != _row_cells(entry)]
        lines += ["", *_key_tables(command, entries)]
    return "\n".join(lines)


def _key_tables(command: str, entries: Sequence[Key | Group]) -> Iterator[str]:
    """Write the keys as HTML tables, each group with its headline above."""
    is_open = False
    for entry in entries:
        if isinstance(entry, Group) or not is_open:
            if is_open:
                yield "</tbody></table>\n"
            if isinstance(entry, Group):
                anchor = f"{command}.{entry.name}"
                yield f"### {entry.name} {{ #{anchor} }}\n\n{_prose(entry.sentence)}{_choices(entry)}\n"
            yield (
                '<table class="keys"><thead><tr><th>key</th><th>default</th><th>type</th>'
                "<th>meaning</th></tr></thead><tbody>"
            )
            is_open = True
        if isinstance(entry, Key):
            anchor, (value, kind, meaning) = escape(f"{command}.{entry.name}"), _row_cells(entry)
            yield (
                f'<tr id="{anchor}"><td><a href="#{anchor}"><code>{escape(entry.name)}</code></a></td>'
                f"<td><code>{value}</code></td><td>{kind}</td><td>{meaning}</td></tr>"
            )
    if is_open:
        yield "</tbody></table>"


def _row_cells(entry: Key | Group) -> tuple[str, ...]:
    """Write default, type and meaning of a key; the sentence of a group."""
    if isinstance(entry, Group):
        return (entry.sentence, *entry.choices)
    return (
        escape(value_text(entry.value)),
        escape(entry.type_text()),
        _prose(entry.knob.sentence) + _choices(entry),
    )


def _prose(text: str) -> str:
    """Write a sentence of the schema as HTML; what stands in backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _choices(entry: Key | Group) -> str:
    """List the files that may be chosen."""
    return (
        f" One of {', '.join(f'<code>{name}</code>' for name in entry.choices)}."
        if entry.choices
        else ""
    )
