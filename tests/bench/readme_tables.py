#!/usr/bin/env python3
"""Writes the tables of README.md from the committed result files, so that no number is typed by hand.

    tests/bench/readme_tables.py           rewrite README.md in place
    tests/bench/readme_tables.py --check   exit 1, with a diff, if README.md is not what the results say

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME picks the function below that makes it.
"""
import difflib
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "tests/bench/results"


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, align, *rows])


def source(results: dict) -> str:
    return f"\n\n{results['device']}, {results['date'][:10]}: `{results['command']}`"


def quickstart() -> str:
    """The table that ./deploy/quickstart prints: served accuracy, latency and memory of the shipped models."""
    results = load("cpu/quickstart.json")
    rows = [[f"`{row['model']}`", row["structures"], f"{100 * row['sparsity']:.1f} %", f"{100 * row['accuracy']:.2f} %",
             f"{row['p50_us']:.0f} / {row['p99_us']:.0f} µs", f"{row['resident_weight_bytes'] / 1024:.0f} KiB",
             f"{100 * row['resident_weight_bytes'] / row['dense_weight_bytes']:.0f} %"]
            for row in results["rows"]]
    header = ["model", "structure found", "sparsity", "accuracy", "p50 / p99", "weights", "of dense"]
    return markdown(header, rows) + source(results)


def h200() -> str:
    """Block-sparse kernels on an H200 against the best of cuBLASLt's heuristics, bf16, 10,240 cubed, cold caches."""
    results = load("h200/linear.json")
    best: dict[tuple, dict] = {}
    for row in results["rows"]:
        key = (row["block"], row["layout"])
        if row["case"] == "bar" and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    def micros(row: dict, column: str) -> str:
        return f"{row[column]:,.0f} µs" if column in row else ""

    body = [[f"{layout}({block})", micros(row, "dense_us"), micros(row, "us"), f"{row['dense_us'] / row['us']:.1f}×",
             micros(row, "torch_bsr_us"), micros(row, "cusparse_us")]
            for (block, layout), row in sorted(best.items())]
    header = ["layout, 90 % sparse", "dense bf16", "sparse bf16", "gain", "PyTorch BSR", "cuSPARSE BSR"]
    return markdown(header, body) + source(results)


def h200_fp32() -> str:
    """fp32 layers on an H200: the fastest kernel over the best of cuBLASLt's heuristics, the batches side by side."""
    results = load("h200/scattered.json")
    rows: dict[tuple, dict] = {}
    for row in results["rows"]:
        if row["case"] == "fp32" and row["planned"]:
            rows.setdefault((row["layout"], row["block"]), {})[row["M"]] = row["dense_us"] / row["us"]
    batches = sorted({batch for cells in rows.values() for batch in cells})
    body = [[f"{layout}({block})" if layout != "csr" else layout,
             *(f"{cells[batch]:.1f}×" if batch in cells else "" for batch in batches)]
            for (layout, block), cells in sorted(rows.items())]
    return markdown(["4,096², 90 % sparse", *(f"batch {batch}" for batch in batches)], body) + source(results)


def linear() -> str:
    """One linear layer, sparse kernel against the best packed oneDNN dense, the batches side by side."""
    results = load("cpu/linear.json")
    rows: dict[tuple, dict] = {}
    for row in results["rows"]:
        if row["case"] == "bar" and row["dtype"] == "f32":
            key = (row["layout"], row["block"], row["sparsity"])
            rows.setdefault(key, {})[row["M"]] = row["dense_us"] / row["us"]
    batches = sorted({batch for cells in rows.values() for batch in cells})
    body = [[f"{layout}({block})" if layout not in ("csr", "dense") else layout, f"{100 * sparsity:.0f} %",
             *(f"{cells[batch]:.1f}×" if batch in cells else "" for batch in batches)]
            for (layout, block, sparsity), cells in sorted(rows.items())]
    return markdown(["layout", "sparsity", *(f"batch {batch}" for batch in batches)], body) + source(results)


def updates() -> str:
    """Weight deltas beside the best of the generic tools and plain index + value, on the same two files."""
    results = load("updates/bytes.json")
    rows = []
    for row in results["rows"]:
        plain = row.get("int32_bf16", row.get("int32_f32"))
        rows.append([row["pair"], f"{row['changes']:,}", f"{row['file_bytes']:,}", f"{row['ours']:,}",
                     f"{row[row['best']]:,} ({row['best']})", f"{row['ratio']:.2f}", f"{row['ours'] / plain:.2f}"])
    for dtype in ("bf16", "f32"):
        ratios = [row["ratio"] for row in results["rows"] if dtype in row["pair"]]
        rows.append([f"geometric mean, {dtype}", "", "", "", "", f"**{math.prod(ratios) ** (1 / len(ratios)):.2f}**", ""])
    header = ["from one checkpoint to the next", "changed", "file", "`.espd`", "best generic tool", "of that",
              "of index + value"]
    return markdown(header, rows) + source(results)


TABLES = {"quickstart": quickstart, "linear": linear, "h200": h200, "h200_fp32": h200_fp32, "updates": updates}


def rendered(text: str) -> str:
    def table(match: re.Match) -> str:
        return f"<!-- table: {match.group(1)} -->\n{TABLES[match.group(1)]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.S)


def main() -> int:
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = rendered(old)
    if "--check" not in sys.argv:
        readme.write_text(new, encoding="utf-8")
        return 0
    sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "README.md", "results"))
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
