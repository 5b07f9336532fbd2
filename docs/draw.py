"""Draw the pictures of README.md: how drafts are verified, and the measured speed-ups.

    python docs/draw.py

Both pictures follow the light or dark theme of the reader's browser.
"""

import re
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent
RESULTS, SECTION = FOLDER / "results/qwen.md", "## On two cores of a CPU"
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 13px; fill: #59636e }
.box { fill: #f6f8fa; stroke: #818b98 }
.draft { fill: #fff8c5; stroke: #d4a72c; stroke-dasharray: 4 3 }
.kept { fill: #dafbe1; stroke: #4ac26b }
.lost { fill: #ffebe9; stroke: #ff8182 }
.bar { fill: #54aeff }
.best { fill: #2da44e }
.line { stroke: #818b98 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .box { fill: #212830; stroke: #656c76 }
  .draft { fill: #3b2e11; stroke: #d29922 }
  .kept { fill: #12361f; stroke: #3fb950 }
  .lost { fill: #451a1d; stroke: #f85149 }
  .bar { fill: #388bfd }
  .best { fill: #3fb950 }
  .line { stroke: #656c76 }
}
"""
NAMES = {
    "vanilla": "no drafts",
    "eagle_chain": "EAGLE-3.1 head, chain of 4",
    "suffix": "suffixes, no head",
    "eagle_tree": "EAGLE-3.1 head, tree of 8",
    "eagle_suffix": "EAGLE-3.1 head and suffixes",
}
"""Labels of the bars, by method."""
ENGINES = {
    "vanilla": "every engine",
    "eagle_chain": "vLLM, SGLang, TensorRT-LLM",
    "suffix": "vLLM",
    "eagle_tree": "SGLang",
    "eagle_suffix": "Headsmith alone",
}
"""Engines that can serve each method (docs/serving/)."""


def build_svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Build an SVG document."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def build_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Draw text."""
    class_attribute = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:g}" y="{y:g}"{class_attribute} text-anchor="{anchor}">{escape(text)}</text>'
    )


def build_token_box(x: float, y: float, token: str, kind: str) -> str:
    """Draw a token in its box."""
    shape = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="76" height="34" rx="6"/>'
    return f"{shape}\n{build_text(x + 38, y + 22, token, anchor='middle')}"


def draw_decoding() -> str:
    """Draw the three steps: draft, verify, accept."""
    known, draft = ["The", "cat"], ["sat", "on", "a", "chair"]
    after, rows = "the", [40, 122, 204]
    steps = [
        ("1. Draft", "the head guesses four tokens"),
        ("2. Verify", "the target reads all of them in one pass"),
        ("3. Accept", "two drafts and a token of its own: 3 from 1 pass"),
    ]
    parts: list[str] = []
    for y, (name, caption) in zip(rows, steps, strict=True):
        parts += [build_text(10, y + 14, name), build_text(10, y + 34, caption, "small")]
        parts += [build_token_box(370 + 84 * n, y, word, "box") for n, word in enumerate(known)]
    kinds = ["kept", "kept", "lost", "lost"]
    for n, (word, kind) in enumerate(zip(draft, kinds, strict=True), start=2):
        x = 370 + 84 * n
        parts += [
            build_token_box(x, rows[0], word, "draft"),
            build_token_box(x, rows[1], word, kind),
        ]
        if kind == "kept":
            parts.append(build_token_box(x, rows[2], word, kind))
    parts.append(build_token_box(370 + 84 * 4, rows[2], after, "kept"))
    title = "Speculative decoding: a head drafts, the target verifies all drafts in one pass"
    return build_svg(890, 260, title, parts)


def parse_speedups(results: str) -> dict[str, tuple[float, str]]:
    """Parse speed-up and interval of each method from the first table of the section."""
    section = results.split(SECTION, maxsplit=1)[1].split("\n## ", maxsplit=1)[0]
    rows = [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    speedups = {}
    for cells in filter(lambda cells: len(cells) == 5, rows):
        method = re.split("[`,]", cells[0])[0]
        if method in NAMES:
            speedups[method] = (float(cells[2]), cells[3])
    return speedups


def draw_speedups(results: str) -> str:
    """Draw a bar for each method, from the slowest to the fastest."""
    left, width, right, speedups = 240, 250, 632, parse_speedups(results)
    order = sorted(speedups, key=lambda method: speedups[method][0])
    scale = width / max(value for value, _ in speedups.values())
    parts = [
        build_text(10, 24, "Tokens per second over no drafts, in Headsmith's own engine"),
        build_text(right, 24, "Who serves it"),
    ]
    for n, method in enumerate(order):
        (value, interval), y = speedups[method], 44 + 34 * n
        kind = "best" if method == order[-1] else "bar"
        parts += [
            build_text(left - 12, y + 17, NAMES[method], anchor="end"),
            f'<rect class="{kind}" x="{left}" y="{y}" width="{value * scale:.0f}" height="24"/>',
            build_text(left + value * scale + 10, y + 17, f"{value:.2f}"),
            build_text(left + value * scale + 54, y + 17, interval, "small"),
            build_text(right, y + 17, ENGINES[method], "small"),
        ]
    end = 44 + 34 * len(order)
    parts.append(f'<line class="line" x1="{left}" y1="38" x2="{left}" y2="{end}"/>')
    caption = "Qwen2.5-Coder-0.5B-Instruct, 16 prompts of four kinds, greedy, two cores with AVX2"
    parts.append(build_text(10, end + 22, f"{caption}; 95% intervals", "small"))
    return build_svg(910, end + 36, "Speed-up of each way to draft", parts)


def main() -> None:
    """Write both pictures beside this file."""
    (FOLDER / "decoding.svg").write_text(draw_decoding())
    (FOLDER / "speedup.svg").write_text(draw_speedups(RESULTS.read_text()))


if __name__ == "__main__":
    main()
