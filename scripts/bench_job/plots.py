"""Line plots as SVG text, without a library. Colours hold on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 36, 48
#: Colours that those who see fewer can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLE = "text{font:12px sans-serif;fill:#777}line{stroke:#999;stroke-opacity:.35}polyline{fill:none;stroke-width:2}"


class _Axis:
    """From values to places between `low` and `high`, and the values at which there is a tick."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool) -> None:
        self._low, self._high, self._log = low, high, log
        least, most = min(values), max(values)
        if log:
            self._least, self._most = least, most if most > least else least * 10
        else:
            self._least, self._most = 0.0, _round_up(most)

    def place(self, value: float) -> float:
        least, most = self._turned(self._least), self._turned(self._most)
        return self._low + (self._turned(value) - least) / (most - least) * (self._high - self._low)

    def _turned(self, value: float) -> float:
        return math.log(value) if self._log else value

    def ticks(self) -> list[float]:
        if not self._log:
            return [self._most * part / 4 for part in range(5)]
        first, last = math.ceil(math.log10(self._least) - 1e-9), math.floor(math.log10(self._most) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def line_plot(
    title: str, x_label: str, y_label: str, series: Mapping[str, Points], log_x: bool = False, x_ticks: bool = False
) -> str:
    """One line a series, with its name beside the title. `x_ticks`: ticks at the points' own places.

    ValueError if there is no point, or one at or below 0 on a logarithmic axis.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    across = _Axis(xs, LEFT, WIDTH - RIGHT, log_x)
    up = _Axis([y for points in series.values() for _, y in points], HEIGHT - BOTTOM, TOP, False)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        _text(LEFT, 18, title, "start"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label),
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    for tick in xs if x_ticks else across.ticks():
        at = across.place(tick)
        drawn += [_line(at, TOP, at, HEIGHT - BOTTOM), _text(at, HEIGHT - BOTTOM + 18, f"{tick:,.0f}")]
    for tick in up.ticks():
        at = up.place(tick)
        drawn += [_line(LEFT, at, WIDTH - RIGHT, at), _text(LEFT - 6, at + 4, f"{tick:,g}", "end")]
    place = WIDTH - RIGHT
    for number, (name, points) in reversed(list(enumerate(series.items()))):
        drawn += _drawn(points, COLOURS[number % len(COLOURS)], across.place, up.place)
        drawn.append(_text(place, 18, name, "end", COLOURS[number % len(COLOURS)]))
        place -= 8 * len(name) + 16
    return "\n".join([*drawn, "</svg>", ""])


def _drawn(points: Points, colour: str, across: Callable[[float], float], up: Callable[[float], float]) -> list[str]:
    places = [(across(x), up(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return [f'<polyline points="{path}" stroke="{colour}"/>', *dots]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "") -> str:
    fill = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(text)}</text>'
