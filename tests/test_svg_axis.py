"""Axes of the report's charts."""

from xml.etree import ElementTree

from jetrl.reporting import svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_zero_has_its_own_place_on_a_log_axis():
    chart = ElementTree.fromstring(svg.line_chart("t", "x", "y", [svg.Curve("a", 0, [1, 2], [0.0, 1e-4])], log=True))
    ticks = {e.text: float(e.get("y")) for e in chart.iter(f"{SVG}text") if e.get("class") == "tick"}
    zero, low = (float(e.get("cy")) for e in chart.iter(f"{SVG}circle"))
    assert ticks["0"] > max(y for label, y in ticks.items() if label.startswith("1e"))
    assert zero > low
