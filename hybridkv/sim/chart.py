"""Hit rate against pool size as an SVG that reads on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 58, 62
_LINE, _APART = 18, 48
_COLOURS = ("#2f7fd0", "#d0742b", "#8a63d2", "#3a9a5b", "#c2478b")

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .page { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .grid { stroke: #3d444d }
    .page { fill: #0d1117 }
  }
"""


class Series(NamedTuple):
    """A line: (pool bytes, hit rate from 0 to 1) in ascending order of pools."""

    name: str
    points: Sequence[tuple[int, float]]
    dashed: bool = False


def line_chart(title: str, series: Sequence[Series]) -> str:
    """An SVG of the lines, named at their right ends. Pools are in GiB on a logarithmic axis.

    Args:
        title: above the plot, cut where it gets too long.
        series: at least one, each with at least two pool sizes.
    """
    pools = sorted({pool for line in series for pool, _ in line.points})
    top = _nice(max(rate for line in series for _, rate in line.points))
    low, high = math.log(pools[0]), math.log(pools[-1])

    def x(pool: float) -> float:
        return LEFT + (math.log(pool) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="30">{escape(_cut(title, 60))}</text>',
    ]
    for i in range(6):
        rate = top * i / 5
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{100 * rate:g} %</text>')
    shown = -math.inf
    floor = HEIGHT - BOTTOM
    for pool in pools:
        at = x(pool)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 5}"/>')
        if at - shown >= _APART:
            shown = at
            parts.append(f'<text x="{at:.1f}" y="{floor + 20}" text-anchor="middle">{pool / 2**30:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 16}" text-anchor="middle">pool size, GiB (log scale)</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="18" y="{height:.0f}" text-anchor="middle" transform="rotate(-90 18 {height:.0f})">'
        "share of prompt tokens found in the cache</text>"
    )
    ends = _spread([y(line.points[-1][1]) for line in series])
    for i, (line, end) in enumerate(zip(series, ends, strict=True)):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{x(pool):.1f},{y(rate):.1f}" for pool, rate in line.points)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            parts += [
                f'<circle cx="{x(pool):.1f}" cy="{y(rate):.1f}" r="3.5" fill="{colour}"/>' for pool, rate in line.points
            ]
        left = WIDTH - RIGHT + 10
        look = f'stroke="{colour}" stroke-width="3"{dash}'
        parts.append(f'<line x1="{left}" x2="{left + 16}" y1="{end:.1f}" y2="{end:.1f}" {look}/>')
        parts.append(f'<text x="{left + 22}" y="{end + 4:.1f}">{escape(_cut(line.name, 18))}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _spread(heights: Sequence[float]) -> list[float]:
    """The heights moved apart so that a line of text fits between any two, in the same order, inside the plot."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    previous = -math.inf
    for i in order:
        placed[i] = previous = max(placed[i], previous + _LINE)
    limit = float(HEIGHT - BOTTOM)
    for i in reversed(order):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - _LINE
    return placed


def _nice(rate: float) -> float:
    """The top of the axis: the smallest of some round rates that no line passes."""
    return next((top for top in (0.01, 0.05, 0.1, 0.2, 0.25, 0.5, 0.75) if rate <= top), 1.0)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
