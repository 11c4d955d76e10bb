"""Line charts and stacked bars as SVG text: axes, ticks, curves, bands, a legend inside the picture.

A picture carries classes only, no colours: `style.py` gives those, so the same SVG is right on a light and a dark page
and, with the light rules put inside it, as a file of its own. Lengths in SVG units; one unit is about one CSS pixel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

WIDTH = 400
FONT = 13
# Advance of an average character in units of the font size. Generous (DejaVu Sans, the widest common one, has 0.6),
# because text that is narrower than thought only leaves a gap, and text that is wider overlaps.
ADVANCE = 0.62
LEGEND_ROOM = WIDTH - 44  # of a name in the legend, swatch and margins taken off
_TOP, _LINE, _PLOT, _RIGHT = 22, 19, 190, 14


@dataclass(frozen=True)
class Curve:
    """style: number of the series' colour and dash. low, high: the band, or None. whole: the last x for which y is the
    mean over all seeds; the curve goes on faintly behind it. None: to its end."""

    label: str
    style: int
    x: list[int]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    whole: int | None = None


def text_width(text: str, size: float = FONT) -> float:
    return len(text) * size * ADVANCE


def fit(text: str, room: float, size: float = FONT) -> str:
    """`text`, cut with an ellipsis where it is wider than `room`."""
    most = max(1, int(room / (size * ADVANCE)))
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: float) -> str:
    """A number for people: four significant digits at most, no exponent where none is needed."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def line_chart(title: str, x_axis: str, y_axis: str, curves: list[Curve], log: bool = False) -> str:
    """One chart. Axes are named on their own lines, the y axis above the plot, so no name can meet a tick label."""
    head, y = _head(title, f"↑ {y_axis}{', log scale' if log else ''}")
    legend, y = _legend([(c.label, "curve", c.style) for c in curves], y)
    top, bottom = y + 6, y + 6 + _PLOT
    scale, ticks = _y_scale(curves, log, top, bottom)
    left = 12 + max(text_width(label) for _, label in ticks)
    x_ticks = _x_ticks([x for c in curves for x in c.x])
    x_of = _linear(x_ticks[0], x_ticks[-1], left, WIDTH - _RIGHT - 8)
    parts = [head, legend]
    for at, label in ticks:
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 6, at + 4.5, label, "tick", "end"))
    for value in x_ticks:
        at = x_of(value)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_text(at, bottom + 18, number(value), "tick", "middle"))
    parts.append(f'<path class="axis" d="M{left:.1f} {top}V{bottom}H{WIDTH - _RIGHT}"/>')
    parts.append(_text(WIDTH - _RIGHT, bottom + 37, f"{x_axis} →", "name", "end"))
    parts += [_band(c, x_of, scale) for c in curves if c.low and c.high]
    parts += [_curve(c, x_of, scale) for c in curves]
    return _svg(title, bottom + 46, parts)


def stacked_bars(title: str, x_axis: str, bars: list[tuple[str, dict[str, float]]], order: list[str]) -> str:
    """One bar per entry, named on a line of its own above it, with its total. order: all parts, for colour and legend."""
    head, y = _head(title, "")
    legend, y = _legend([(part, "fill", number) for number, part in enumerate(order)], y)
    longest = max(sum(parts.values()) for _, parts in bars)
    ticks = _nice(0, longest, 5)
    left, right = 8.0, WIDTH - _RIGHT - 8
    x_of = _linear(0, max(ticks[-1], longest), left, right)
    y += 4
    top, body = y, []
    for name, parts in bars:
        total = f"{number(sum(parts.values()))} s"
        body.append(_text(left + 5, y + 15, fit(name, right - left - text_width(total) - 17), "label"))
        body.append(_text(right, y + 15, total, "label", "end"))
        at = 0.0
        for part in order:
            if part in parts:
                x0, x1 = x_of(at), x_of(at + parts[part])
                says = f"<title>{escape(f'{name}: {part} {number(parts[part])} s')}</title>"
                shape = f'x="{x0:.2f}" y="{y + 21}" width="{x1 - x0:.2f}" height="22"'
                body.append(f'<rect class="f{order.index(part)}" {shape}>{says}</rect>')
                at += parts[part]
        y += 52
    parts_ = [head, legend]
    for value in ticks:
        at = x_of(value)
        parts_.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 4}"/>')
        parts_.append(_text(at, y + 18, number(value), "tick", "start" if value == 0 else "middle"))
    parts_.append(f'<path class="axis" d="M{left} {top}V{y}H{right}"/>')
    parts_.append(_text(right, y + 37, f"{x_axis} →", "name", "end"))
    return _svg(title, y + 46, [*parts_, *body])


def _svg(title: str, height: float, parts: list[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _head(title: str, axis: str) -> tuple[str, float]:
    parts = _text(8, _TOP - 4, fit(title, WIDTH - 16, FONT + 2), "title")
    if not axis:
        return parts, _TOP + 4
    return parts + _text(8, _TOP + 16, fit(axis, WIDTH - 16), "name"), _TOP + 24


def _legend(entries: list[tuple[str, str, int]], y: float) -> tuple[str, float]:
    """Swatch and name of each entry, in columns where they take several lines; and the y below it."""
    labels = [fit(label, LEGEND_ROOM) for label, _, _ in entries]
    widths = [34 + text_width(label) + 12 for label in labels]
    fitting = (n for n in range(len(entries), 1, -1) if sum(max(widths[i::n]) for i in range(n)) <= WIDTH - 8 + 12)
    columns = next(fitting, 1)
    starts = [8.0 + sum(max(widths[i::columns]) for i in range(column)) for column in range(columns)]
    parts: list[str] = []
    for place, (label, (_, kind, style)) in enumerate(zip(labels, entries, strict=True)):
        x = starts[place % columns]
        if place and place % columns == 0:
            y += _LINE
        if kind == "curve":
            parts.append(f'<path class="line c{style}" d="M{x:.1f} {y + 8}h26"/>')
        else:
            parts.append(f'<rect class="f{style}" x="{x:.1f}" y="{y + 2}" width="24" height="12"/>')
        parts.append(_text(x + 32, y + 12.5, label, "label"))
    return "".join(parts), y + _LINE


def _linear(a: float, b: float, at_a: float, at_b: float) -> Callable[[float], float]:
    return lambda value: at_a + (value - a) / ((b - a) or 1.0) * (at_b - at_a)


def _nice(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most `most` + 2 round values that cover low..high; whole: whole numbers only."""
    if high <= low:
        low, high = (low - 0.5, high + 0.5) if low == high else (high, low)
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * (1 - 1e-9) and not (whole and m == 2.5))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _x_ticks(steps: list[int]) -> list[float]:
    low, high = min(steps), max(steps)
    if low == high:
        return [low]
    return _nice(low, high, 6, whole=True)


def _y_scale(curves: list[Curve], log: bool, top: float, bottom: float):
    """(value -> y, [(y, tick label)])."""
    numbers = [v for c in curves for row in (c.y, c.low or [], c.high or []) for v in row]
    if log and any(v > 0 for v in numbers):
        return _log_scale(numbers, top, bottom)
    low, high = min(numbers), max(numbers)
    # Shares and sizes start at 0 where that costs less than half the picture.
    if 0 < low and low < high / 2:
        low = 0.0
    if low == high:
        low, high = (0.0, 2 * high) if high > 0 else (2 * low, 0.0) if low < 0 else (0.0, 1.0)
    ticks = _nice(low, high, 5)
    scale = _linear(ticks[0], ticks[-1], bottom, top)
    return scale, [(scale(t), number(t)) for t in ticks]


def _log_scale(numbers: list[float], top: float, bottom: float):
    """Zeros cannot lie on a log axis and matter most here (bits that agree): they get a lane of their own at the bottom."""
    positive = [v for v in numbers if v > 0]
    has_zero = len(positive) < len(numbers)
    low, high = math.floor(math.log10(min(positive)) + 1e-9), math.ceil(math.log10(max(positive)) - 1e-9)
    high = max(high, low + 1)
    floor = bottom - 30 if has_zero else bottom
    at = _linear(low, high, floor, top)
    every = max(1, math.ceil((high - low) / 6))
    ticks = [(at(power), f"1e{power}") for power in range(low, high + 1, every)]
    if high - low <= 2:
        ticks += [(at(p + math.log10(m)), f"{m}e{p}") for p in range(low, high) for m in (2, 5)]
    if has_zero:
        ticks.append((bottom - 4, "0"))
    return (lambda v: at(math.log10(v)) if v > 0 else bottom - 4), ticks


def _points(xs: list[int], ys: list[float], x_of, y_of) -> list[tuple[float, float]]:
    return [(x_of(x), y_of(y)) for x, y in zip(xs, ys, strict=True)]


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _curve(curve: Curve, x_of, y_of) -> str:
    points = _points(curve.x, curve.y, x_of, y_of)
    # Both parts share the point where they meet, so that the curve has no gap.
    count = len(points) if curve.whole is None else sum(x <= curve.whole for x in curve.x)
    parts = ((points[:count], ""), (points[max(count - 1, 0) :], " faint"))
    line = "".join(
        f'<path class="line c{curve.style}{kind}" d="{_path(part)}"/>' for part, kind in parts if len(part) > 1
    )
    if len(curve.x) > 25:
        return line
    dots = []
    for x, y in zip(curve.x, curve.y, strict=True):
        says = escape(f"{curve.label}, step {x}: {number(y)}")
        dots.append(
            f'<circle class="dot d{curve.style}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3"><title>{says}</title></circle>'
        )
    return line + "".join(dots)


def _band(curve: Curve, x_of, y_of) -> str:
    upper, lower = _points(curve.x, curve.high, x_of, y_of), _points(curve.x, curve.low, x_of, y_of)
    return f'<path class="band b{curve.style}" d="{_path(upper + lower[::-1])}Z"/>'
