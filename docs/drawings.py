"""The drawings of docs/concepts.md: `python docs/drawings.py` writes them to docs/drawings.

Colours are named classes with a second set for a dark background, so that a drawing can be read on
either. All text is text, and a drawing is as wide as the screen of a phone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("drawings")
WIDTH = 380
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #57606a; }
.box { fill: #ffffff; stroke: #57606a; }
.a { fill: #b6d4fe; stroke: #2f6fc4; } .b { fill: #ffdfb0; stroke: #b36b00; }
.c { fill: #c8efd0; stroke: #2c8a45; } .d { fill: #f4c9d6; stroke: #b0355e; }
.none { fill: #eceff2; stroke: #a8b0b8; }
.line { stroke: #57606a; fill: none; } .head { fill: #57606a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .small { fill: #9da7b1; }
.box { fill: #161b22; stroke: #9da7b1; }
.a { fill: #1d3f6e; stroke: #6ea8fe; } .b { fill: #5c3d0a; stroke: #f0ad4e; }
.c { fill: #1c4d2a; stroke: #6fd08c; } .d { fill: #5e2138; stroke: #f08bb0; }
.none { fill: #262c34; stroke: #596069; }
.line { stroke: #9da7b1; } .head { fill: #9da7b1; }
}
"""


class Drawing:
    """Boxes, words and arrows on a canvas; `title` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, []

    def box(self, x: float, y: float, w: float, h: float, kind: str, *lines: str) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>'
        )
        top = y + h / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.word(x + w / 2, top + 16 * i, line, small=i > 0, anchor="middle")

    def word(
        self, x: float, y: float, text: str, small: bool = False, anchor: str = "start"
    ) -> None:
        kind = ' class="small"' if small else ""
        where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.parts.append(f"<text{kind} {where}>{escape(text)}</text>")

    def words(self, y: float, *lines: str) -> None:
        """Lines at the left edge, below each other."""
        for i, line in enumerate(lines):
            self.word(4, y + 17 * i, line)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
        self.parts.append(f'<line class="line" {ends} marker-end="url(#head)"/>')

    def svg(self) -> str:
        width, height = self.size
        head = (
            '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            '<path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n<defs>{head}</defs>\n{body}\n</svg>\n"
        )


def statistics() -> Drawing:
    """Logits of a tile to five numbers per token, a loss, four coefficients, and the gradient."""
    d = Drawing(WIDTH, 306, "From hidden states to statistics, a loss, coefficients and gradients")
    d.words(20, "A loss sees statistics, not logits;", "a kernel sees coefficients, not a loss.")
    columns, rows, width, height = (4, 132, 260), (56, 146, 236), 116, 54
    boxes = (
        (0, 0, "a", "hidden", "[T, H]"),
        (1, 0, "none", "a tile of logits", "never kept whole"),
        (2, 0, "b", "statistics", "5 a token"),
        (2, 1, "c", "your loss", "PyTorch on [T]"),
        (1, 1, "d", "coefficients", "4 a token"),
        (1, 2, "none", "their gradient", "in the same tile"),
        (0, 2, "a", "dX and dW", "one product each"),
    )
    for column, row, kind, *lines in boxes:
        d.box(columns[column], rows[row], width, height, kind, *lines)
    right = (120, 132), (248, 260)
    for start, end in right:
        d.arrow(start, 83, end, 83)
    d.arrow(318, 110, 318, 146)
    d.arrow(260, 173, 248, 173)
    d.arrow(190, 200, 190, 236)
    d.arrow(132, 263, 120, 263)
    d.word(254, 216, "by autograd", small=True, anchor="middle")
    return d


def reductions() -> Drawing:
    """The weight of each token under four reductions."""
    d = Drawing(WIDTH, 296, "Weight of each token under four reductions, of sequences of 4 and 2")
    rows = (
        ("token_mean", ["1/6"] * 6, "1 / all tokens"),
        ("sequence_mean", ["1/8"] * 4 + ["1/4"] * 2, "1 / (sequences x own length)"),
        ("sequence_sum", ["1/2"] * 6, "1 / sequences"),
        ("fixed_length(5)", ["1/10"] * 6, "1 / (sequences x 5)"),
    )
    d.words(20, "Two sequences, of four tokens and of two.", "A reduction is a weight per token:")
    for i, (name, weights, rule) in enumerate(rows):
        y = 64 + 60 * i
        d.word(4, y, name)
        d.word(376, y, rule, small=True, anchor="end")
        for j, weight in enumerate(weights):
            gap = 12 if j >= 4 else 0
            d.box(4 + 60 * j + gap, y + 8, 56, 28, "a" if j < 4 else "b", weight)
    return d


def segments() -> Drawing:
    """Padded rows and one packed row hold the same sequences."""
    d = Drawing(WIDTH, 290, "The same sequences padded and packed, and what reaches the head")
    kinds, lengths = ("a", "b", "c"), (5, 2, 3)
    d.words(20, "Segments say which tokens form a sequence.", "Padded, [B, T]:")
    for row, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        for column in range(6):
            filled = 0 < column <= length
            d.box(4 + 62 * column, 50 + 30 * row, 60, 26, kind if filled else "none")
            text = "" if filled else "pad" if column else "prompt"
            d.word(34 + 62 * column, 67 + 30 * row, text, small=True, anchor="middle")
    d.words(160, "Unscored positions have the target -100:", "no loss, no gradient, no product.")
    d.words(206, "Packed, [T], Segments.from_lengths([5, 2, 3]):")
    x = 4
    for kind, length in zip(kinds, lengths, strict=True):
        for _ in range(length):
            d.box(x, 218, 34, 26, kind)
            x += 36
        x += 6
    d.words(264, "Both give the same loss and gradient:", "scored tokens alone reach the head.")
    return d


def totals() -> Drawing:
    """Micro-batches and ranks share the denominators of the whole step."""
    d = Drawing(WIDTH, 324, "Totals of a step are shared by its micro-batches and ranks")
    d.words(20, "Denominators are those of the whole step,", "so that the parts add up:")
    for i, (rank, first, second) in enumerate((("rank 0", 90, 30), ("rank 1", 60, 20))):
        y = 52 + 60 * i
        d.word(4, y + 30, rank)
        d.box(56, y, 170, 50, "a", "micro-batch 1", f"{first} tokens")
        d.box(234, y, 140, 50, "b", "micro-batch 2", f"{second} tokens")
    d.arrow(140, 162, 140, 196)
    d.box(56, 196, 170, 50, "c", "Totals", "200 tokens")
    d.arrow(226, 221, 250, 221)
    d.box(250, 196, 124, 50, "d", "a token's weight", "1 / 200")
    d.words(272, "sum(Totals.of(batch) for batch in step),", "then .all_reduce(group).")
    d.words(312, "A mean of means favours small micro-batches.")
    return d


def schedules() -> Drawing:
    """What is visited when, in the four schedules."""
    d = Drawing(WIDTH, 494, "Four schedules: one pass, frozen head, held and recompute")
    d.words(20, "The matrix tokens x vocabulary, and what of it", "exists at one time (filled):")
    names = ("one pass", "frozen head", "held", "recompute")
    texts = (
        ("statistics, loss, gradient", "of a chunk, then the next", "6NHV"),
        ("dX for unit coefficients,", "scaled in the backward", "4NHV"),
        ("softmax terms of all, until", "the gradient is known", "6NHV"),
        ("all statistics, then logits", "again, a slab at a time", "8NHV"),
    )
    chunk, slab = (0, 26, 150, 24), (50, 0, 34, 90)
    filled = (chunk, chunk, (0, 0, 150, 90), slab)
    for i, (name, lines, (dx, dy, w, h)) in enumerate(zip(names, texts, filled, strict=True)):
        x, y = 20 + 190 * (i % 2), 76 + 190 * (i // 2)
        d.word(x + 75, y - 8, name, anchor="middle")
        d.box(x, y, 150, 90, "box")
        d.box(x + dx, y + dy, w, h, "abcd"[i])
        for j, line in enumerate(lines):
            d.word(x + 75, y + 108 + 17 * j, line, small=j < 2, anchor="middle")
    d.word(10, 124, "N", anchor="middle")
    d.words(438, "N tokens, H width, V vocabulary;", "a matrix product has 2NHV operations.")
    d.words(474, "auto takes the first, in this order, that loss", "and memory budget allow.")
    return d


def precision() -> Drawing:
    """Which numbers have which width on their way."""
    d = Drawing(WIDTH, 300, "Where 16 bits and where 32 bits are kept")
    d.words(20, "A bfloat16 head: what has 16 bits on the way,", "and what has 32:")
    boxes = (
        ("a", "hidden, weight", "bfloat16"),
        ("b", "logits", "float32"),
        ("b", "statistics, loss", "float32"),
        ("a", "logit gradient", "bfloat16"),
        ("b", "sums of dW", "float32"),
        ("a", "dX, dW", "bfloat16"),
    )
    for i, (kind, name, width) in enumerate(boxes):
        x = 4 + 128 * (i if i < 3 else 5 - i)
        d.box(x, 50 if i < 3 else 136, 116, 54, kind, name, width)
    for start, end in ((120, 132), (248, 260)):
        d.arrow(start, 77, end, 77)
        d.arrow(end, 163, start, 163)
    d.arrow(318, 104, 318, 136)
    d.words(212, "A logit of 27 rounded to bfloat16 is off by up to", "0.06, and a ratio by 6 %.")
    d.words(250, "float16 gradients are scaled by a power of two;", "float64 inputs stay float64.")
    return d


ALL: tuple[Callable[[], Drawing], ...] = (
    statistics,
    reductions,
    segments,
    totals,
    schedules,
    precision,
)


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for make in ALL:
        path = FOLDER / f"{make.__name__}.svg"
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text(make().svg())
        partial.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
