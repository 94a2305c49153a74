"""The drawings of docs/concepts.md: `python docs/drawings.py` writes them to docs/drawings.

Colours are named classes with a second set for a dark background, so that a drawing can be read on
either. All text is text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("drawings")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #57606a; }
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
    d = Drawing(760, 216, "From hidden states to statistics, a loss, coefficients and gradients")
    d.box(10, 60, 90, 60, "a", "hidden", "[T, H]")
    d.box(130, 60, 110, 60, "none", "a tile of logits", "never kept whole")
    d.box(270, 60, 130, 60, "b", "statistics", "5 numbers a token")
    d.box(430, 60, 130, 60, "c", "your loss", "plain PyTorch on [T]")
    d.box(590, 60, 150, 60, "d", "coefficients", "4 numbers a token")
    for x, to in ((100, 130), (240, 270), (400, 430), (560, 590)):
        d.arrow(x, 90, to, 90)
    d.word(335, 46, "logp, lse, entropy, mean logit, top-1", small=True, anchor="middle")
    d.word(575, 46, "autograd", small=True, anchor="middle")
    d.parts.append('<path class="line" d="M665,120 V168 H186" />')
    d.arrow(186, 168, 186, 122)
    d.box(10, 146, 140, 44, "a", "dX and dW", "one product each")
    d.arrow(186, 168, 152, 168)
    text = "the tile's logits become their gradient in place"
    d.word(425, 186, text, small=True, anchor="middle")
    d.word(10, 24, "A loss sees statistics, not logits; a kernel sees coefficients, not a loss.")
    return d


def reductions() -> Drawing:
    """The weight of each token under four reductions."""
    d = Drawing(760, 230, "Weight of each token under four reductions, of sequences of 4 and 2")
    rows = (
        ("token_mean", ["1/6"] * 6, "1 / all tokens"),
        ("sequence_mean", ["1/8"] * 4 + ["1/4"] * 2, "1 / (sequences x own length)"),
        ("sequence_sum", ["1/2"] * 6, "1 / sequences"),
        ("fixed_length(5)", ["1/10"] * 6, "1 / (sequences x 5)"),
    )
    d.word(10, 24, "Two sequences, of four tokens and of two. A reduction is a weight per token:")
    for i, (name, weights, rule) in enumerate(rows):
        y = 44 + 44 * i
        d.word(10, y + 22, name)
        for j, weight in enumerate(weights):
            gap = 14 if j >= 4 else 0
            d.box(150 + 58 * j + gap, y, 54, 34, "a" if j < 4 else "b", weight)
        d.word(530, y + 22, rule, small=True)
    return d


def segments() -> Drawing:
    """Padded rows and one packed row hold the same sequences."""
    d = Drawing(760, 250, "The same sequences padded and packed, and what reaches the head")
    kinds, lengths = ("a", "b", "c"), (5, 2, 3)
    d.word(10, 24, "Segments say which tokens form a sequence. Padded, [B, T]:")
    for row, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        for column in range(6):
            filled = column <= length
            prompt = column == 0
            d.box(
                10 + 44 * column, 36 + 30 * row, 42, 26,
                kind if filled and not prompt else "none",
            )  # fmt: skip
            text = "prompt" if prompt else "" if filled else "pad"
            d.word(31 + 44 * column, 53 + 30 * row, text, small=True, anchor="middle")
    d.word(300, 54, "unscored positions have the target -100:", small=True)
    d.word(300, 72, "no loss, no gradient, no place in a product", small=True)
    d.word(10, 152, "Packed, [T], with Segments.from_lengths([5, 2, 3]) or cu_seqlens 0, 5, 7, 10:")
    x = 10
    for kind, length in zip(kinds, lengths, strict=True):
        for _ in range(length):
            d.box(x, 164, 42, 26, kind)
            x += 44
        x += 6
    d.word(10, 222, "Both give the same loss and gradient: scored tokens alone reach the head.")
    return d


def totals() -> Drawing:
    """Micro-batches and ranks share the denominators of the whole step."""
    d = Drawing(760, 220, "Totals of a step are shared by its micro-batches and ranks")
    d.word(10, 24, "Denominators are those of the whole step, so that the parts add up:")
    for i, (rank, first, second) in enumerate((("rank 0", 90, 30), ("rank 1", 60, 20))):
        y = 44 + 66 * i
        d.word(10, y + 30, rank)
        d.box(70, y, 150, 50, "a", "micro-batch 1", f"{first} tokens")
        d.box(230, y, 110, 50, "b", "micro-batch 2", f"{second} tokens")
        d.arrow(342, y + 25, 420, 104)
    d.box(424, 80, 130, 50, "c", "Totals", "200 tokens")
    d.arrow(556, 105, 610, 105)
    d.box(614, 80, 136, 50, "d", "weight of a token", "1 / 200 everywhere")
    d.word(10, 196, "sum(Totals.of(batch) for batch in step), then .all_reduce(group).")
    d.word(10, 213, "A mean of means would favour the tokens of small micro-batches.")
    return d


def schedules() -> Drawing:
    """What is visited when, in the four schedules."""
    d = Drawing(760, 335, "Four schedules: one pass, frozen head, held and recompute")
    d.word(10, 24, "The matrix tokens x vocabulary, and what of it exists at one time (filled):")

    def grid(x: float, filled: list[tuple[int, int, int, int]], kind: str) -> None:
        d.box(x, 60, 150, 130, "box")
        for dx, dy, w, h in filled:
            d.box(x + dx, 60 + dy, w, h, kind)

    names = ("one pass", "frozen head", "held", "recompute")
    texts = (
        ("statistics, loss and", "gradient of a chunk of", "tokens, then the next", "6NHV"),
        ("no weight gradient: dX", "for unit coefficients,", "scaled in the backward", "4NHV"),
        ("softmax terms of all", "tokens in 2 bytes, until", "the gradient is known", "6NHV"),
        ("first all statistics, then", "logits again, a slab of", "columns at a time", "8NHV"),
    )
    chunk, slab = (0, 36, 150, 32), (50, 0, 34, 130)
    filled = ([chunk], [chunk], [(0, 0, 150, 130)], [slab])
    for i, (name, lines, parts) in enumerate(zip(names, texts, filled, strict=True)):
        x = 22 + 186 * i
        d.word(x + 75, 50, name, anchor="middle")
        grid(x, parts, "abcd"[i])
        for j, line in enumerate(lines):
            d.word(x + 75, 216 + 17 * j, line, small=j < 3, anchor="middle")
    d.word(10, 130, "T", anchor="middle")
    d.word(97, 203, "V", small=True, anchor="middle")
    d.word(10, 308, "N tokens, H width, V vocabulary; one matrix product is 2NHV operations.")
    d.word(10, 325, "auto takes the first, from the left, that loss and memory budget allow.")
    return d


def precision() -> Drawing:
    """Which numbers have which width on their way."""
    d = Drawing(760, 200, "Where 16 bits and where 32 bits are kept")
    d.word(10, 24, "A bfloat16 head: what has 16 bits on the way, and what has 32:")
    boxes = (
        ("a", "hidden, weight", "bfloat16"),
        ("b", "logits", "float32, unrounded"),
        ("b", "statistics, loss", "float32"),
        ("a", "gradient of logits", "bfloat16"),
        ("b", "sums of dW", "float32"),
        ("a", "dX, dW", "bfloat16"),
    )
    for i, (kind, name, width) in enumerate(boxes):
        x = 8 + 126 * i
        d.box(x, 50, 114, 56, kind, name, width)
        if i:
            d.arrow(x - 12, 78, x - 1, 78)
    d.word(10, 140, "A logit of 27 rounded to bfloat16 is off by up to 0.06, and a ratio by 6 %:")
    d.word(10, 158, "tokens move across a clip at 0.2, and sequences across one at 3e-4.")
    text = "float16 gradients are scaled by a power of two; float64 inputs stay float64."
    d.word(10, 184, text, small=True)
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
