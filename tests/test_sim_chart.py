"""The chart: every line named, no two texts at one place, nothing outside the page."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

from hybridkv.sim.chart import HEIGHT, WIDTH, Series, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_lines_that_end_together_have_names_that_do_not_overlap() -> None:
    series = [Series(f"policy {i}", [(2**30, 0.1), (2**33, rate)]) for i, rate in enumerate([0.301, 0.3, 0.302, 0.0])]
    series.append(Series("unbounded", [(2**30, 0.31), (2**33, 0.31)], dashed=True))
    root = ElementTree.fromstring(line_chart("hits & <misses>", series))
    texts = {node.text: node for node in root.iter(f"{SVG}text")}
    heights = sorted(float(texts[line.name].get("y", "")) for line in series)
    assert all(after - before >= 15 for before, after in itertools.pairwise(heights))
    assert "hits & <misses>" in texts
    assert {"1", "8", "0 %", "50 %"} <= set(texts)
    for node in root.iter():
        for name, most in (("x", WIDTH), ("y", HEIGHT), ("cx", WIDTH), ("cy", HEIGHT)):
            assert 0 <= float(node.get(name, "0")) <= most


def test_pool_sizes_that_lie_close_together_are_not_all_written() -> None:
    points = [(2**30 + i, 0.5) for i in range(5)] + [(2**34, 0.6)]
    root = ElementTree.fromstring(line_chart("x" * 200, [Series("lru", points)]))
    places = [float(node.get("x", "")) for node in root.iter(f"{SVG}text") if node.get("text-anchor") == "middle"]
    ticks = sorted(places)[1:]
    assert sum(node.text == "1" for node in root.iter(f"{SVG}text")) == 1
    assert len(ticks) == len(set(ticks))
    assert all(len(node.text or "") <= 60 for node in root.iter(f"{SVG}text"))
