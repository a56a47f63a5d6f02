"""Writes the page and the picture of each claim from the JSON of its whole form: `python docs/studies/write.py [NAME ...]`.

The JSON comes of `tcemu study NAME --out docs/studies --overwrite`. Nothing is measured here, so that the same bytes come every time; the
words in the JSON become those that the claim has now.
"""

import json
import runpy
import sys
from collections.abc import Iterable
from math import ceil, floor, log2, log10
from pathlib import Path
from types import SimpleNamespace

from tcemu.uses.study.claims import get_claim
from tcemu.uses.study.claims.claim_types import Outcome, QuantityResult

HERE = Path(__file__).resolve().parent
DRAW = SimpleNamespace(**runpy.run_path(str(HERE.parent / "pictures" / "draw.py")))
COLOURS = ("#1f5fa8", "#b3261e", "#2e7d32", "#8e5a00", "#6a3d9a", "#444444")
WIDTH, LEFT, RIGHT, TOP, HEIGHT, ROW = 640, 78, 620, 40, 280, 26
SMALL = ' font-size="13"'


def outcome(name: str) -> Outcome:
    """What the JSON of a claim holds."""
    return Outcome.from_facts(get_claim(name), json.loads((HERE / f"{name}.json").read_text()))


class Axis:
    """Values to pixels, from `first` to `last`; logarithmic where all values are above zero and span more than a factor of 8."""

    def __init__(self, values: Iterable[float], first: int, last: int, base: int) -> None:
        known = list(values)
        self.first, self.last, self.base = first, last, base
        self.logarithmic = min(known) > 0 and max(known) > 8 * min(known)
        low, high = min(known), max(known)
        if self.logarithmic:
            low, high, self.step = self._log(low), self._log(high), 1.0
            self.step = float(max(1, round((high - low) / 6)))
        else:
            room = (high - low) or abs(high) or 1.0
            whole = 10.0 ** floor(log10(room / 4))
            self.step = next(whole * part for part in (1, 2, 5, 10) if whole * part * 5 >= room)
        self.low, self.high = floor(low / self.step + 1e-9), ceil(high / self.step - 1e-9)  # in steps
        self.high += self.low == self.high

    def _log(self, value: float) -> float:
        return log2(value) if self.base == 2 else log10(value)

    def at(self, value: float) -> int:
        place = (self._log(value) if self.logarithmic else value) / self.step
        return round(self.first + (self.last - self.first) * (place - self.low) / (self.high - self.low))

    def ticks(self) -> list[tuple[int, str]]:
        """Pixels and words, at each step."""
        places = [number * self.step for number in range(self.low, self.high + 1)]
        if self.logarithmic:
            return [(self.at(self.base**place), f"{self.base}{DRAW.superscript(int(place))}") for place in places]
        return [(self.at(place), f"{place:.4g}") for place in places]


def picture(found: Outcome) -> str:
    """Lines where quantities have places on a line, else marks beside their names. Ours is filled, what is published is a ring."""
    placed = [row for row in found.rows if row.quantity.x is not None]
    return lines(found, placed) if placed else marks(found)


def lines(found: Outcome, rows: list[QuantityResult]) -> str:
    """A line for each series, with a bar from the least to the most of the seeds."""
    x = Axis([row.quantity.x or 0 for row in rows], LEFT + 10, RIGHT - 10, 2)
    given = [row.quantity.published for row in rows if row.quantity.published is not None]
    y = Axis([value for row in rows for value in row.values] + given, TOP + HEIGHT, TOP, 10)
    body = [DRAW.text(16, 22, found.claim.y_label, more=' font-weight="600"')]
    for place, words in y.ticks():
        body.append(f'<path d="M{LEFT} {place}H{RIGHT}" stroke="#dddddd"/>')
        body.append(DRAW.text(LEFT - 8, place + 5, words, "end", DRAW.FAINT, SMALL))
    for value in sorted({row.quantity.x or 0 for row in rows}):
        body.append(DRAW.text(x.at(value), TOP + HEIGHT + 20, f"{value:g}", "middle", DRAW.FAINT, SMALL))
    body.append(DRAW.text((LEFT + RIGHT) // 2, TOP + HEIGHT + 44, found.claim.x_label, "middle"))
    series = list(dict.fromkeys(row.quantity.series for row in rows))
    for number, name in enumerate(series):
        own = sorted((row for row in rows if row.quantity.series == name), key=lambda row: row.quantity.x or 0)
        colour = COLOURS[number % len(COLOURS)]
        points = [(x.at(row.quantity.x or 0), y.at(row.ours)) for row in own]
        line = "L".join(f"{a} {b}" for a, b in points)
        body.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for row, (a, b) in zip(own, points, strict=True):
            body.append(f'<path d="M{a} {y.at(min(row.values))}V{y.at(max(row.values))}" stroke="{colour}" stroke-width="5"/>')
            body.append(f'<circle cx="{a}" cy="{b}" r="4" fill="{colour}"/>')
            if row.quantity.published is not None:
                body.append(ring(a, y.at(row.quantity.published)))
        below = TOP + HEIGHT + 70 + 22 * number
        body += [f'<path d="M{LEFT} {below - 5}h24" stroke="{colour}" stroke-width="2.5"/>', DRAW.text(LEFT + 32, below, name, fill=colour)]
    below = TOP + HEIGHT + 70 + 22 * len(series)
    body += legend(below) if given else []
    return DRAW.document(WIDTH, below + (12 if given else -8), found.claim.title, body)


def marks(found: Outcome) -> str:
    """A mark for each quantity, names downwards."""
    rows = found.rows
    left = 24 + 7 * max(len(row.quantity.name) for row in rows)
    given = [row.quantity.published for row in rows if row.quantity.published is not None]
    x = Axis([value for row in rows for value in row.values] + given, left + 12, RIGHT - 12, 10)
    bottom = TOP + ROW * len(rows)
    body = [DRAW.text(16, 22, found.claim.y_label, more=' font-weight="600"')]
    for place, words in x.ticks():
        body.append(f'<path d="M{place} {TOP}V{bottom}" stroke="#dddddd"/>')
        body.append(DRAW.text(place, bottom + 18, words, "middle", DRAW.FAINT, SMALL))
    for number, row in enumerate(rows):
        y = TOP + ROW * number + ROW // 2
        body.append(DRAW.text(left, y + 5, row.quantity.name, "end", more=SMALL))
        body.append(f'<path d="M{x.at(min(row.values))} {y}H{x.at(max(row.values))}" stroke="{COLOURS[0]}" stroke-width="5"/>')
        body.append(f'<circle cx="{x.at(row.ours)}" cy="{y}" r="4" fill="{COLOURS[0]}"/>')
        if row.quantity.published is not None:
            body.append(ring(x.at(row.quantity.published), y))
    body += legend(bottom + 44) if given else []
    return DRAW.document(WIDTH, bottom + (56 if given else 32), found.claim.title, body)


def ring(x: int, y: int) -> str:
    return f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{DRAW.INK}" stroke-width="2"/>'


def legend(y: int) -> list[str]:
    return [ring(LEFT + 12, y - 5), DRAW.text(LEFT + 32, y, "published; filled marks are tcemu's, with all seeds")]


def page(found: Outcome) -> str:
    """The page as Markdown."""
    name, title = found.claim.name, found.claim.title
    return "\n".join(
        [
            f"# {title[0].upper()}{title[1:]}",
            "",
            f"{found.claim.citation}: {', '.join(f'<{link}>' for link in found.claim.link.split())}.",
            "",
            "```{image} " + f"{name}.svg",
            f":alt: {found.claim.y_label or title}, as the table below has it.",
            f":width: {WIDTH}px",
            "```",
            "",
            "<!-- parsed only: it takes minutes -->",
            "```sh",
            f"tcemu study {name}",
            "```",
            "",
            "```text",
            str(found),
            "```",
            "",
            f"`--quick` is a reduced form, in seconds: {found.claim.reduced}",
            "",
        ]
    )


def main(names: list[str]) -> int:
    for name in names or sorted(path.stem for path in HERE.glob("*.json")):
        found = outcome(name)
        for end, text in (("json", found.to_json(indent=1) + "\n"), ("svg", picture(found)), ("md", page(found))):
            (HERE / f"{name}.{end}").write_text(text)
        print(HERE / f"{name}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
