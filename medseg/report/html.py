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
# Chart libraries, in the order of loading: each needs the one before it.
_LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
# Width of the largest pictures in a page.
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
        kind: Word for the kind of page, such as `report`, which is shown above the heading.
        title: Heading.
        tiles: Pairs of a name and a value for the top of the page.
        charts: Group to its charts. The template gets them as `figures`: group to pairs of the
            index of a chart in `specs` and its heading.
        values: Further values of the template.

    Returns:
        HTML.
    """

    def source(name: str) -> Markup:
        # `Markup`: style sheets and scripts must not be escaped.
        return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))

    # The specifications of all groups in one list, which the page's script draws.
    specs: list[dict[str, Any]] = []
    figures: dict[str, list[tuple[int, str]]] = {}
    for group, group_charts in charts.items():
        figures[group] = []
        for chart in group_charts:
            figures[group].append((len(specs), chart.heading))
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

    Args:
        path: File of the picture.
        say: Receives a sentence if the file is missing or damaged.

    Returns:
        The URI; "" for such a file.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    # Besides OSError, these are the errors of Pillow for a damaged file: SyntaxError for a broken
    # part, ValueError for one that is too short, and the last for a size that is too large.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        say(f"{path} is left out: {error}")
        return ""
    # `thumbnail` keeps the proportions. The limit of the height is too large to matter.
    image.thumbnail((_MAX_WIDTH_PX, 10 * _MAX_WIDTH_PX))
    file = io.BytesIO()
    # `subsampling=0` keeps colour in full resolution: the outlines are one pixel wide.
    image.save(file, "JPEG", quality=82, subsampling=0, optimize=True)
    text = base64.b64encode(file.getvalue()).decode()
    return f"data:image/jpeg;base64,{text}"
