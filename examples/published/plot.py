"""Draws the curves of the published results, from the ``results.json`` of folders, for ``docs/benchmarks.md``.

    python examples/published/plot.py

A thin line is a seed, a thick one the mean over seeds; both are means of up to three steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
WIDTH, HEIGHT = 640, 320
LEFT, TOP, RIGHT, BOTTOM = 48, 40, 16, 36
COLOURS = ("#3b5bdb", "#e8590c", "#2b8a3e")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value with its neighbours."""
    windows = [values[max(0, index - 1) : index + 2] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def points(values: Sequence[float]) -> str:
    """Return the points of a curve with values from 0 to 1, one for each step."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    across = [LEFT + width * index / max(1, len(values) - 1) for index in range(len(values))]
    return " ".join(f"{x:.1f},{TOP + height * (1 - y):.1f}" for x, y in zip(across, values, strict=True))


def line(values: Sequence[float], colour: str, *, thick: bool) -> str:
    """Return a curve."""
    style = 'stroke-width="2.5"' if thick else 'stroke-width="1" opacity="0.4"'
    return f'<polyline fill="none" stroke="{colour}" {style} points="{points(values)}"/>'


def text(x: float, y: float, content: str, anchor: str = "start", colour: str = "#222") -> str:
    """Return a text at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{content}</text>'


def axes(steps: int) -> list[str]:
    """Return the lines and numbers of both axes."""
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y + 4, f"{share:g}", "end"))
    parts.append(text(LEFT, HEIGHT - 16, "1"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 16, f"step {steps}", "end"))
    return parts


def picture(title: str, curves: dict[str, list[list[float]]]) -> str:
    """Return a picture of the rewards of each arm, by step, as SVG.

    Args:
        title: Of the picture.
        curves: By arm, for each seed the mean reward of each step.
    """
    steps = max(len(curve) for seeds in curves.values() for curve in seeds)
    parts = [text(LEFT, 20, f"{title}: reward in training"), *axes(steps)]
    for number, (arm, seeds) in enumerate(curves.items()):
        colour = COLOURS[number]
        mean = [sum(values) / len(values) for values in zip(*seeds, strict=False)]
        parts += [line(smoothed(curve), colour, thick=False) for curve in seeds]
        parts.append(line(smoothed(mean), colour, thick=True))
        parts.append(text(WIDTH - RIGHT - 90 * (len(curves) - 1 - number), 20, arm, "end", colour))
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    return f'{head}\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'


def main() -> int:
    """Draw all results that have been written down."""
    for file in sorted(HERE.glob("*/results.json")):
        result = json.loads(file.read_text())
        curves = {arm: [run["reward"] for run in seeds.values()] for arm, seeds in result["arms"].items()}
        path = IMAGES / f"results-{file.parent.name}.svg"
        path.write_text(picture(result["title"], curves))
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
