#!/usr/bin/env python3
"""Sizes and times of weight deltas beside bsdiff, hdiffz, zstd --patch-from, xdelta3 and plain index + value.

    tests/bench/updates_bytes.py --out tests/bench/results/updates/bytes.json
    tests/bench/updates_bytes.py --only dense    some pairs; the rows of the others in --out stay as they are
    tests/bench/updates_bytes.py --tools bsdiff  ours and bsdiff anew, the others' sizes and times from the same pair in
                                                 --out; with --tools= only ours. A row names tools that it lacks: not_run
    tests/bench/updates_bytes.py --keep FOLDER   checkpoints go there and are used again when they are there already

Every tool gets the same two files; ours counts with manifest and one signature, the others with nothing of the kind.

Pairs. Real ones: the shipped MNIST models, fine-tuned with Adam in numpy (fp32 master weights, batches of 128 of the
test images) after a warm-up that fills Adam's moments: one step, a hundred steps, and a regrow step, which drops the
smallest 1 % of the non-zeros and grows as many zeros where the gradient is largest, as RigL does. bf16 checkpoints are
the master weights rounded to nearest even. The same of a pruned MiniLM (minilm.py). Synthetic ones: normal weights, an
fp32 residual below the bf16 rounding, and a step of Adam's size; the sparse one moves 0.1 % of its positions as well.

Sizes are exact; times are worth what the machine was quiet: "load" is its load average.

On the synthetic pairs of 1 GiB the other tools are not run: bsdiff takes 17 GB of memory for it and half an hour, zstd -19
an hour. Their elements are independent of each other, so that sizes and times of the same pair of 64 MiB, times 16, stand
in for them ("scaled_from_mib": 64); ours is measured on the whole file.

Needs: build/release/bin/updates_bench; bsdiff, xdelta3 and zstd (Debian packages of these names); numpy, onnx and
hdiffpatch (pip install numpy onnx hdiffpatch), and what minilm.py says for MiniLM.
"""
import argparse
import datetime
import functools
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import hdiffpatch
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/integration"))

import training  # noqa: E402

WARM_UP = 20
RATE = 1e-4  # a tenth of the rate that the models were trained with
TOOLS = ("bsdiff", "hdiffz", "zstd", "xdelta3")
CUT, WHOLE = 64, 1024  # MiB of the synthetic pairs
OLD, NEW = "old.safetensors", "new.safetensors"


# --- data ---------------------------------------------------------------------------------------------------------

def to_bf16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of fp32 values rounded to nearest even bf16 (no NaN among them)."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray], dtype: str) -> pathlib.Path:
    """Writes tensors, bf16 ones as their bits, the way the reference writer lays them out."""
    header, blobs, offset = {}, [], 0
    for name in sorted(tensors):
        blob = tensors[name].tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return path


# --- pairs --------------------------------------------------------------------------------------------------------

def trained_pair(folder: pathlib.Path, model: str, dtype: str, steps: int, rate: float, regrow: bool = False) -> None:
    """Writes the checkpoints before and after `steps`, both after the warm-up."""
    mlp = training.Mlp(model, rate)
    mlp.train(WARM_UP)

    def save(path: pathlib.Path) -> None:
        convert = to_bf16 if dtype == "bf16" else np.asarray
        write_safetensors(path, {k: convert(v) for k, v in mlp.parameters.items()}, dtype.upper())

    save(folder / OLD)
    if regrow:
        mlp.regrow()
    mlp.train(steps)
    save(folder / NEW)


@functools.lru_cache(maxsize=1)
def minilm_checkpoints() -> dict[int, dict[str, np.ndarray]]:
    """Returns MiniLM's weights before, after one step and after a hundred: trained once for all its pairs."""
    import minilm  # jax, which the other pairs do without
    return minilm.checkpoints((1, 100))


def minilm_pair(folder: pathlib.Path, dtype: str, steps: int) -> None:
    """Writes MiniLM before and after `steps`."""
    convert = to_bf16 if dtype == "bf16" else np.asarray
    for name, step in ((OLD, 0), (NEW, steps)):
        write_safetensors(folder / name, {k: convert(v) for k, v in minilm_checkpoints()[step].items()}, dtype.upper())


def synthetic_pair(folder: pathlib.Path, mebibytes: int, sparsity: float, moved: float, rate: float = 3e-6) -> None:
    """A bf16 tensor [n, 4096] before and after a step of about `rate` in a random direction for each weight."""
    random = np.random.default_rng(7)
    rows = mebibytes * (1 << 20) // (2 * 4096)
    before, after = np.empty((rows, 4096), np.uint16), np.empty((rows, 4096), np.uint16)
    for begin in range(0, rows, 4096):
        shape = before[begin:begin + 4096].shape
        master = random.normal(0, 0.02, shape).astype(np.float32)
        mask = random.random(shape) >= sparsity
        new_mask = mask.copy()
        if moved:
            drop = mask & (random.random(shape) < moved)
            new_mask &= ~drop
            off = np.flatnonzero(~mask.reshape(-1))
            new_mask.reshape(-1)[random.choice(off, drop.sum(), replace=False)] = True
        step = (rate * random.normal(0, 1, shape)).astype(np.float32)
        grown = new_mask & ~mask
        new = np.where(grown, step, master + step)
        before[begin:begin + 4096] = to_bf16(np.where(mask, master, 0))
        after[begin:begin + 4096] = to_bf16(np.where(new_mask, new, 0))
    for name, elements in ((OLD, before), (NEW, after)):
        write_safetensors(folder / name, {"model.layers.0.mlp.weight": elements}, "BF16")


# --- tools --------------------------------------------------------------------------------------------------------

def timed(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def bsdiff(old: pathlib.Path, new: pathlib.Path, out: pathlib.Path) -> float:
    return timed(["bsdiff", old, new, out])


def xdelta3(old: pathlib.Path, new: pathlib.Path, out: pathlib.Path) -> float:
    window = max(1 << 26, 1 << (old.stat().st_size - 1).bit_length())
    return timed(["xdelta3", "-e", "-9", "-f", "-B", str(min(window, (1 << 31) - 1)), "-s", old, new, out])


def zstd(old: pathlib.Path, new: pathlib.Path, out: pathlib.Path) -> float:
    return timed(["zstd", "-19", "--long=31", "-q", "-f", f"--patch-from={old}", new, "-o", out])


def hdiffz(old: pathlib.Path, new: pathlib.Path, out: pathlib.Path) -> float:
    """The smallest of its strongest compressors; the time of the match search and one of them."""
    begin = time.perf_counter()
    patch = hdiffpatch.diff(old.read_bytes(), new.read_bytes(), compression="zstd")
    seconds = time.perf_counter() - begin
    patches = [patch] + [hdiffpatch.recompress(patch, compression=c)
                         for c in (hdiffpatch.ZStdConfig(level=21), "lzma2", "bzip2")]
    out.write_bytes(min(patches, key=len))
    return seconds


def measure(name: str, folder: pathlib.Path, args: argparse.Namespace, known: dict, cut: dict | None) -> dict:
    """Returns the row of one pair; what is not to run from `known`, if that is of the same pair, or all from its `cut`."""
    old, new = folder / OLD, folder / NEW
    run = subprocess.run([args.bench, old, new, f"--rounds={args.rounds}"], check=True, capture_output=True, text=True)
    row = {"pair": name, **json.loads(run.stdout), "load": round(os.getloadavg()[0], 1)}
    if cut:
        factor = WHOLE // CUT
        row.update({key: round(factor * value, 4) for key, value in cut.items() if key.removesuffix("_s") in TOOLS})
        row["scaled_from_mib"] = CUT
    elif all(known.get(key) == row[key] for key in ("changes", "nonzeros", "file_bytes")):
        row.update({key: value for key, value in known.items() if key.removesuffix("_s") in TOOLS})
    for tool in () if cut else args.tools:
        out = folder / f"patch.{tool}"
        row[f"{tool}_s"] = round(globals()[tool](old, new, out), 4)
        row[tool] = out.stat().st_size
        out.unlink()
    value_bytes = 2 if "bf16" in name else 4
    row["int32_bf16" if value_bytes == 2 else "int32_f32"] = (4 + value_bytes) * row["changes"]
    if not_run := [tool for tool in TOOLS if tool not in row]:
        row["not_run"] = not_run
    best = min((tool for tool in TOOLS if tool in row), key=lambda tool: row[tool])
    row["best"], row["ratio"] = best, round(row["ours"] / row[best], 4)
    print(f"{name:40s} {row['changes']:9d} changes  ours {row['ours']:9d}  {best} {row[best]:9d}  ratio {row['ratio']:.3f}"
          f"  encode {row.get('bsdiff_s', math.nan) / row['encode_s']:.0f}x bsdiff"
          f"  decode {row['decode_ns'] / row['decode_allowed_ns']:.2f} of allowed", flush=True)
    return row


def synthetic_name(mebibytes: int, kind: str) -> str:
    return f"synthetic {mebibytes} MiB bf16, {kind}"


def pairs():
    """Yields name and maker of each pair, and the name of the cut that stands in for it with the other tools."""
    for model in ("dense", "unstructured", "diagonal", "diagonal16", "block16"):
        for dtype in ("bf16", "f32"):
            for steps in (1, 100):
                yield (f"{model} {dtype}, {steps} step{'s' * (steps > 1)}",
                       lambda f, m=model, d=dtype, s=steps: trained_pair(f, "mnist_" + m, d, s, RATE), None)
    for dtype in ("bf16", "f32"):
        yield (f"unstructured {dtype}, regrow and 1 step",
               lambda f, d=dtype: trained_pair(f, "mnist_unstructured", d, 1, RATE, regrow=True), None)
    for dtype in ("bf16", "f32"):
        for steps in (1, 100):
            yield (f"MiniLM {dtype}, {steps} step{'s' * (steps > 1)}",
                   lambda f, d=dtype, s=steps: minilm_pair(f, d, s), None)
    for size in (CUT, WHOLE):
        for kind, sparsity, moved in (("dense", 0.0, 0.0), ("90 % zeros", 0.9, 0.0), ("90 % zeros, moved", 0.9, 0.001)):
            yield (synthetic_name(size, kind), lambda f, s=size, z=sparsity, m=moved: synthetic_pair(f, s, z, m),
                   None if size == CUT else synthetic_name(CUT, kind))


def device() -> str:
    """Returns the CPU's name and how many of them this process may use."""
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")]
    return f"{names[0]}, {len(names)} CPUs"


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def made(folder: pathlib.Path, make) -> pathlib.Path:
    """Returns the folder, with both checkpoints of the pair in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / NEW).exists():
        make(folder)
    return folder


def write_result(out: pathlib.Path, rows: dict[str, dict]) -> None:
    """Writes the rows in the order of pairs(), one a line."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    ordered = [rows[name] for name, _, _ in pairs() if name in rows]
    head = {"device": device(), "commit": commit.stdout.strip(), "date": datetime.date.today().isoformat(),
            "command": "tests/bench/updates_bytes.py", "geometric_mean": round(geomean([row["ratio"] for row in ordered]), 4)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, ordered)) + "\n]}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/release/bin/updates_bench")
    parser.add_argument("--tools", type=lambda text: [tool for tool in text.split(",") if tool], default=list(TOOLS),
                        help="run these; the others' part from --out")
    parser.add_argument("--only", default="", help="pairs whose name contains this")
    parser.add_argument("--keep", type=pathlib.Path, help="folder in which the checkpoints stay")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if unknown := set(args.tools) - set(TOOLS):
        parser.error(f"no such tool: {', '.join(unknown)}")
    missing = [tool for tool in ("bsdiff", "xdelta3", "zstd") if not shutil.which(tool)]
    if missing or not args.bench.exists():
        print(f"missing: {' '.join(missing) or args.bench} (see --help)", file=sys.stderr)
        return 2
    rows = {}
    if args.out and args.out.exists():
        rows = {row["pair"]: row for row in json.loads(args.out.read_text(encoding="utf-8"))["rows"]}
    for name, make, cut in pairs():
        if args.only not in name:
            continue
        if cut and cut not in rows:
            print(f"{name}: needs the row of {cut} first", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory() as folder:
            path = made(args.keep / name.replace(" ", "_") if args.keep else pathlib.Path(folder), make)
            rows[name] = measure(name, path, args, rows.get(name, {}), rows.get(cut))
        if args.out:
            write_result(args.out, rows)
    print(f"geometric mean of ours / best tool: {geomean([row['ratio'] for row in rows.values()]):.3f} over {len(rows)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
