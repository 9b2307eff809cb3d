"""A timeline as text, or as a picture."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turnwise.trainer.observe.timeline import CHECKPOINT, EVALUATION, GROUP, SYNC, UPDATE, WAIT, Part, Span

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_NAMES: Final = 12
_ROWS: Final = (("trainer", {WAIT: "·", UPDATE: "█"}), ("weights", {SYNC: "█"}))
_RARE: Final = (("evaluation", {EVALUATION: "█"}), ("checkpoint", {CHECKPOINT: "█"}))
_COLOURS: Final = {
    GROUP: "#8fb8de", WAIT: "#e6e6e6", UPDATE: "#d98850", SYNC: "#5b8c5a", EVALUATION: "#9a7bb5", CHECKPOINT: "#777777",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """What is drawn of a part.

    Attributes:
        part: What a process did.
        begin: Seconds since it began.
        end: The same.
    """

    part: Part
    begin: float
    end: float

    @classmethod
    def of(cls, part: Part, seconds: tuple[float | None, float | None] = (None, None)) -> Window:
        """Return the window of a part between two times; by default from its first work to its last."""
        first = min((each.begin for each in part.spans), default=0.0)
        begin, end = seconds
        begin = first if begin is None else begin
        end = part.seconds if end is None else end
        return cls(part, begin, max(end, begin + 1e-3))

    def spans(self, what: str) -> list[Span]:
        """Return the spans of one kind that reach into the window, in the order in which they began."""
        found = [each for each in self.part.spans if each.what == what]
        inside = [each for each in found if each.begin < self.end and self.until(each) > self.begin]
        return sorted(inside, key=lambda each: each.begin)

    def until(self, span: Span) -> float:
        """Return when a span ended; one that never did ends with the part."""
        return self.part.seconds if span.end is None else span.end


def draw_text(window: Window, *, width: int = 100) -> list[str]:
    """Return the lines of a drawing.

    A column is a stretch of time; a mark stands in it where that work took most of it, or where it would else be seen
    nowhere.

    Args:
        window: What is drawn.
        width: Columns of the time axis.
    """
    step = (window.end - window.begin) / width
    rows = list(_ROWS) + [(name, marks) for name, marks in _RARE if any(window.spans(what) for what in marks)]
    flying = _mean_flying(window, width, step)
    most = max(flying, default=0.0)
    peak = f"at most {round(most)} groups on their way"
    head = f"{window.part.mode}, {window.end - window.begin:.2f} s, a column is {step:.3f} s; {peak}"
    levels = [_LEVELS[0 if not each else max(1, round(each / most * (len(_LEVELS) - 1)))] for each in flying]
    lines = [head, "", _row("rollouts", levels)]
    for name, marks in rows:
        cells = [" "] * width
        for what, mark in marks.items():
            for span in window.spans(what):
                first, last = _columns(span, window, width, step)
                cells[first : last + 1] = [mark] * (last + 1 - first)
        lines.append(_row(name, cells))
    lines.append(_row("step", _labels(window, width, step)))
    return lines


def draw_svg(window: Window, *, width: int = 960) -> str:
    """Return a picture: one bar for each piece of work, groups stacked as they overlap.

    Args:
        window: What is drawn.
        width: In pixels.
    """
    left, bar, gap = 90, 14, 6
    scale = (width - left - 10) / (window.end - window.begin)
    parts: list[str] = []
    top = 30.0

    def draw(span: Span, y: float, height: float) -> None:
        begin, end = max(span.begin, window.begin), min(window.until(span), window.end)
        x, long = left + (begin - window.begin) * scale, max(1.0, (end - begin) * scale)
        title = html.escape(f"{span.what} {span.name}: {span.begin:.2f} to {window.until(span):.2f} s")
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{long:.1f}" height="{height:.1f}" fill="{_COLOURS[span.what]}">'
            f"<title>{title}</title></rect>"
        )

    lanes = _lanes(window)
    thin = max(2.0, min(6.0, 120 / max(1, len(lanes))))
    parts.append(_text("rollouts", top + 10))
    for lane in lanes:
        for span in lane:
            draw(span, top, thin - 0.5)
        top += thin
    top += gap
    rows = list(_ROWS) + [(name, marks) for name, marks in _RARE if any(window.spans(what) for what in marks)]
    for name, marks in rows:
        parts.append(_text(name, top + 11))
        for what in marks:
            for span in window.spans(what):
                draw(span, top, bar)
        top += bar + gap
    title = f"{window.part.mode}: {window.end - window.begin:.2f} s"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:.0f}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="10" y="18" font-weight="bold">{html.escape(title)}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(text: str, y: float) -> str:
    return f'<text x="10" y="{y:.1f}">{text}</text>'


def _lanes(window: Window) -> list[list[Span]]:
    """Return groups in rows in which none overlaps another."""
    lanes: list[list[Span]] = []
    for span in window.spans(GROUP):
        free = next((lane for lane in lanes if window.until(lane[-1]) <= span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _mean_flying(window: Window, width: int, step: float) -> list[float]:
    """Return how many groups were on their way in each column, mean over its time."""
    found = [0.0] * width
    for span in window.spans(GROUP):
        begin, end = max(span.begin, window.begin), min(window.until(span), window.end)
        for column in range(int((begin - window.begin) / step), min(width, int((end - window.begin) / step) + 1)):
            start = window.begin + column * step
            found[column] += max(0.0, min(end, start + step) - max(begin, start)) / step
    return found


def _columns(span: Span, window: Window, width: int, step: float) -> tuple[int, int]:
    first = round((max(span.begin, window.begin) - window.begin) / step)
    last = round((min(window.until(span), window.end) - window.begin) / step) - 1
    first = min(first, width - 1)
    return first, min(max(first, last), width - 1)


def _labels(window: Window, width: int, step: float) -> Sequence[str]:
    """Return the numbers of the steps, each where its first update begins, as far as there is room."""
    cells, free, shown = [" "] * width, 0, set[str]()
    for span in window.spans(UPDATE):
        first, _ = _columns(span, window, width, step)
        if span.name in shown or first < free or first + len(span.name) > width:
            continue
        shown.add(span.name)
        cells[first : first + len(span.name)] = span.name
        free = first + len(span.name) + 1
    return cells


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<{_NAMES}}{''.join(cells)}".rstrip()
