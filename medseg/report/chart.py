"""Charts as inline SVG: no script is needed to read them, colours follow the page's light or dark scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from markupsafe import Markup

from medseg.report.scale import Scale

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 46
_MAX_POINTS = 400
_CHARACTER = 7  # width of one, about


@dataclass(frozen=True)
class Axes:
    """Two scales and their titles.

    Attributes:
        x: Scale to the right.
        y: Scale upwards.
        x_title: Name below.
        y_title: Name at the left.
        size: Width and height in units of the drawing; text is about 12 of them high.
    """

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    size: tuple[int, int] = (560, 320)

    @property
    def right(self) -> int:
        """Where the x axis ends."""
        return self.size[0] - _RIGHT

    @property
    def bottom(self) -> int:
        """Where the y axis begins."""
        return self.size[1] - _BOTTOM

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Distance of a point from the left and from the top."""
        return _LEFT + self.x.at(x) * (self.right - _LEFT), _TOP + (1 - self.y.at(y)) * (self.bottom - _TOP)


@dataclass(frozen=True)
class Series:
    """Points of one run.

    Attributes:
        setting: Number of its setting, which is its colour.
        name: Tooltip.
        points: (x, y).
        is_dashed: Drawn as a broken line, for runs that did not finish.
    """

    setting: int
    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


def line_chart(series: Sequence[Series], axes: Axes, title: str) -> Markup:
    """One line per run; a line under the pointer says its run."""
    svg = _frame(axes, title)
    for one in series:
        group = ElementTree.SubElement(svg, "g", {"class": f"series s{one.setting}" + (" dashed" if one.is_dashed else "")})
        ElementTree.SubElement(group, "title").text = one.name
        places = [axes.place(*point) for point in _thin(one.points)]
        path = _path(places)
        # The wide invisible line is what the pointer meets.
        ElementTree.SubElement(group, "path", {"class": "hit", "d": path})
        ElementTree.SubElement(group, "path", {"class": "line", "d": path})
        _dot(group, places[-1], radius=3)
    return _text(svg)


def point_chart(series: Sequence[Series], axes: Axes, title: str, line: Sequence[tuple[float, float]] = ()) -> Markup:
    """One dot per point, which says its run under the pointer; behind them a line, if one is given."""
    svg = _frame(axes, title)
    if line:
        ElementTree.SubElement(svg, "path", {"class": "guide", "d": _path([axes.place(*point) for point in line])})
    for one in series:
        group = ElementTree.SubElement(svg, "g", {"class": f"series s{one.setting}"})
        ElementTree.SubElement(group, "title").text = one.name
        for point in one.points:
            _dot(group, axes.place(*point), radius=5.5)
    return _text(svg)


def choices(values: Sequence[str]) -> Scale:
    """An axis of names; the place of the n-th name is n.

    Example:
        >>> choices(["plain", "amp"]).ticks
        ((0.0, 'plain'), (1.0, 'amp'))
    """
    return Scale(-0.6, len(values) - 0.4, tuple((float(place), value) for place, value in enumerate(values)))


def _frame(axes: Axes, title: str) -> ElementTree.Element:
    """Axes, grid and titles."""
    (width, height), right, bottom = axes.size, axes.right, axes.bottom
    svg = ElementTree.Element("svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": title, "class": "chart"})
    grid = ElementTree.SubElement(svg, "g", {"class": "grid", "aria-hidden": "true"})
    for value, text in axes.y.ticks:
        _, top = axes.place(axes.x.low, value)
        _line(grid, (_LEFT, top), (right, top))
        _label(grid, _LEFT - 8, top + 4, text, "end")
    # Long names share the width; what does not fit is cut, the tooltips of the points have it whole.
    room = max(3, int((right - _LEFT) / max(1, len(axes.x.ticks)) / _CHARACTER))
    for value, text in axes.x.ticks:
        left, _ = axes.place(value, axes.y.low)
        _line(grid, (left, bottom), (left, bottom + 5))
        _label(grid, left, bottom + 19, text if len(text) <= room else text[: room - 1] + "…", "middle")
    _line(grid, (_LEFT, bottom), (right, bottom), "axis")
    _label(grid, (_LEFT + right) / 2, height - 6, axes.x_title, "middle", "axis-title")
    name = _label(grid, 0, 0, axes.y_title, "middle", "axis-title")
    name.set("transform", f"translate(13 {(_TOP + bottom) / 2:.0f}) rotate(-90)")
    return svg


def _line(parent: ElementTree.Element, start: tuple[float, float], end: tuple[float, float], kind: str = "rule") -> None:
    ends = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
    ElementTree.SubElement(parent, "line", {"class": kind, **{name: f"{value:.1f}" for name, value in ends.items()}})


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{left:.1f} {top:.1f}" for left, top in places)


def _dot(parent: ElementTree.Element, place: tuple[float, float], radius: float) -> None:
    ElementTree.SubElement(parent, "circle", {"cx": f"{place[0]:.1f}", "cy": f"{place[1]:.1f}", "r": f"{radius:g}"})


def _label(
    parent: ElementTree.Element, left: float, top: float, text: str, anchor: str, kind: str = "tick"
) -> ElementTree.Element:
    place = {"x": f"{left:.1f}", "y": f"{top:.1f}", "text-anchor": anchor, "class": kind}
    label = ElementTree.SubElement(parent, "text", place)
    label.text = text
    return label


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most some hundred points, the last one among them: more than pixels are no use."""
    stride = -(-len(points) // _MAX_POINTS)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _text(svg: ElementTree.Element) -> Markup:
    # ElementTree escapes what users called their runs.
    return Markup(ElementTree.tostring(svg, encoding="unicode"))
