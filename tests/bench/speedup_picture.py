#!/usr/bin/env python3
"""Draws how much faster than dense sparse layers are, over their sparsity: one panel a batch size, one curve a layout.

    tests/bench/speedup_picture.py           write the pictures from the committed results
    tests/bench/speedup_picture.py --check   exit 1 if a picture is not what the results say

Rows of the case "curve", the fastest variant of each (linear_gpu --suite curves); plain SVG, no library.
"""
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "tests/bench/results"
PICTURES = {"h200/curves.json": "h200/curves.svg"}

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP, BOTTOM = 250, 240, 48, 58, 22, 62
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#e08a00", "#555555")


def name_of(row: dict) -> str:
    return row["layout"] if row["layout"] in ("csr", "two_four") else f"{row['layout']}({row['block']})"


def curves(results: dict) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """Points (density, gain) by batch and layout."""
    found: dict[int, dict[str, list]] = {}
    for row in results["rows"]:
        if row["case"] == "curve" and row["planned"]:
            point = (1 - row["sparsity"], row["dense_us"] / row["us"])
            found.setdefault(row["M"], {}).setdefault(name_of(row), []).append(point)
    return {batch: {name: sorted(points, reverse=True) for name, points in layouts.items()}
            for batch, layouts in sorted(found.items())}


class Axes:
    """From (density, gain), both on logarithmic scales, to pixels of one panel."""

    def __init__(self, left: float, points: list[tuple[float, float]]):
        self.left = left
        self.density = (max(d for d, _ in points), min(d for d, _ in points))
        self.gain = (min(0.5, *(g for _, g in points)), max(2.0, *(g for _, g in points)) * 1.1)

    def x(self, density: float) -> float:
        share = math.log(self.density[0] / density) / math.log(self.density[0] / self.density[1])
        return self.left + share * PANEL_WIDTH

    def y(self, gain: float) -> float:
        share = math.log(gain / self.gain[0]) / math.log(self.gain[1] / self.gain[0])
        return TOP + (1 - share) * PANEL_HEIGHT


def panel(axes: Axes, batch: int, layouts: dict, colours: dict, first: bool) -> list[str]:
    right, bottom = axes.left + PANEL_WIDTH, TOP + PANEL_HEIGHT
    parts = [f'<rect x="{axes.left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#999"/>',
             f'<text x="{axes.left + PANEL_WIDTH / 2}" y="{TOP - 8}" text-anchor="middle">batch {batch}</text>']
    for gain in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50):
        if not axes.gain[0] <= gain <= axes.gain[1]:
            continue
        y = axes.y(gain)
        style = 'stroke="#333" stroke-dasharray="4 3"' if gain == 1 else 'stroke="#ddd"'
        parts.append(f'<line x1="{axes.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" {style}/>')
        if first:
            parts.append(f'<text x="{axes.left - 6}" y="{y + 4:.1f}" text-anchor="end">{gain:g}×</text>')
    for percent in (50, 70, 80, 90, 95, 98, 99):
        density = 1 - percent / 100
        if axes.density[1] * 0.99 <= density <= axes.density[0] * 1.01:
            parts.append(f'<text x="{axes.x(density):.1f}" y="{bottom + 16}" text-anchor="middle">{percent}</text>')
    for name, points in layouts.items():
        path = " ".join(f"{axes.x(density):.1f},{axes.y(gain):.1f}" for density, gain in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{axes.x(density):.1f}" cy="{axes.y(gain):.1f}" r="2.6" fill="{colours[name]}"/>'
                  for density, gain in points]
    return parts


def picture(results: dict) -> str:
    by_batch = curves(results)
    names = sorted({name for layouts in by_batch.values() for name in layouts})
    colours = dict(zip(names, COLOURS))
    points = [point for layouts in by_batch.values() for series in layouts.values() for point in series]
    width = LEFT + len(by_batch) * (PANEL_WIDTH + GAP)
    height = TOP + PANEL_HEIGHT + BOTTOM
    row = next(row for row in results["rows"] if row["case"] == "curve")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>',
             f'<text x="{LEFT}" y="20" font-size="14">Times as fast as dense (cuBLASLt, {row["dtype"]}), over % of zeros: '
             f'{row["N"]} × {row["K"]}, {results["device"].split(",")[0]}, {results["date"][:10]}, '
             f'commit {results["commit"]}</text>']
    for i, (batch, layouts) in enumerate(by_batch.items()):
        parts += panel(Axes(LEFT + i * (PANEL_WIDTH + GAP), points), batch, layouts, colours, i == 0)
    for i, name in enumerate(names):
        x, y = LEFT + i * 140, height - 14
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{colours[name]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    stale = 0
    for source, target in PICTURES.items():
        svg = picture(json.loads((RESULTS / source).read_text(encoding="utf-8")))
        if "--check" not in sys.argv[1:]:
            (RESULTS / target).write_text(svg, encoding="utf-8")
        elif (RESULTS / target).read_text(encoding="utf-8") != svg:
            print(f"{target} is not what {source} says; run tests/bench/speedup_picture.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
