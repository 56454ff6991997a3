"""HTML pages in one file: templates with style sheet, script, chart library and pictures inside."""

import base64
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medseg import __version__
from medseg.report.charts import Chart
from medseg.report.templates import open_templates

_TEMPLATES = Path(__file__).parent / "page"
_LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
_MAX_WIDTH_PX = 960


def render_page(
    template: str,
    kind: str,
    title: str,
    tiles: Sequence[Any],
    charts: Mapping[str, list[Chart]],
    **values: Any,
) -> str:
    """Render a page that needs no server, network or further file.

    Args:
        template: File in `page/`.
        kind: Word for the kind of page.
        title: Heading.
        tiles: Pairs of a name and a figure for the top of the page.
        charts: Group to its charts. The template gets them as `figures`, pairs of a number and a
            heading.
        values: Further values of the template.
    """

    def source(name: str) -> Markup:
        return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))

    # The charts are numbered through all groups.
    specs: list[dict[str, Any]] = []
    figures: dict[str, list[tuple[int, str]]] = {}
    for name, group in charts.items():
        figures[name] = []
        for chart in group:
            figures[name].append((len(specs), chart.heading))
            specs.append(chart.spec)
    # A page without a chart does without 0.8 MB of scripts.
    libraries = []
    if specs:
        libraries = [source(f"vega/{name}") for name in _LIBRARIES]
    return (
        open_templates(_TEMPLATES)
        .get_template(template)
        .render(
            css=source("page.css"),
            js=source("page.js"),
            libraries=libraries,
            specs=specs,
            figures=figures,
            version=__version__,
            made=time.strftime("%Y-%m-%d %H:%M"),
            kind=kind,
            title=title,
            tiles=tiles,
            **values,
        )
    )


def data_uri(path: Path, say: Callable[[str], None]) -> str:
    """Encode a picture as a JPEG data URI, at most 960 pixels wide.

    A file that is no whole picture gives "", and `say` a sentence.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        say(f"{path} is left out: {error}")
        return ""
    image.thumbnail((_MAX_WIDTH_PX, 10 * _MAX_WIDTH_PX))
    file = io.BytesIO()
    # Colour in full resolution: the outlines are one pixel wide.
    image.save(file, "JPEG", quality=82, subsampling=0, optimize=True)
    text = base64.b64encode(file.getvalue()).decode()
    return f"data:image/jpeg;base64,{text}"
