#!/usr/bin/env python3
"""Sizes and times of weight deltas beside bsdiff, hdiffz, zstd --patch-from, xdelta3 and plain index + value.

    tests/bench/updates_bytes.py --out tests/bench/results/updates/bytes.json
    tests/bench/updates_bytes.py --slow          also the pairs of 1 GB (bsdiff takes most of an hour on them)
    tests/bench/updates_bytes.py --only dense    some pairs; the rows of the others in --out stay as they are
    tests/bench/updates_bytes.py --ours          ours anew, the other tools' sizes and times from the same pair in --out

Every tool gets the same two files; ours counts with manifest and one signature, the others with nothing of the kind.

Pairs. Real ones: the shipped MNIST models, fine-tuned with Adam in numpy (fp32 master weights, batches of 128 of the
test images) after a warm-up that fills Adam's moments: one step, a hundred steps, and a regrow step, which drops the
smallest 1 % of the non-zeros and grows as many zeros where the gradient is largest, as RigL does. bf16 checkpoints are
the master weights rounded to nearest even. Synthetic ones: normal weights, an fp32 residual below the bf16 rounding, and
a step of Adam's size; the sparse one moves 0.1 % of its positions as well.

Needs: build/release/bin/updates_bench; bsdiff, xdelta3 and zstd (Debian packages of these names); numpy, onnx and
hdiffpatch (pip install numpy onnx hdiffpatch).
"""
import argparse
import datetime
import gzip
import json
import math
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import hdiffpatch
import numpy as np
import onnx
from onnx import numpy_helper

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "tests/data/models"
MNIST = ROOT / "tests/data/mnist"
BATCH = 128
WARM_UP = 20
RATE = 1e-4  # a tenth of the rate that the models were trained with
TOOLS = ("bsdiff", "hdiffz", "zstd", "xdelta3")


# --- data ---------------------------------------------------------------------------------------------------------

def read_idx(path: pathlib.Path) -> np.ndarray:
    """Returns the unsigned bytes of a gzipped idx file, in its shape."""
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(struct.unpack(f">{rank}I", content[4:4 + 4 * rank]))


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


# --- training -----------------------------------------------------------------------------------------------------

class Mlp:
    """A shipped perceptron with its mask, trained on with Adam in fp32."""

    def __init__(self, name: str, rate: float, seed: int = 1):
        self.model = onnx.load(MODELS / name / "1/model.onnx")
        self.parameters = self._parameters()
        self.masks = {k: (v != 0).astype(np.float32) for k, v in self.parameters.items()}
        for name_of in self.masks:
            if name_of.endswith("bias"):
                self.masks[name_of][...] = 1
        self.rate, self.step_count = np.float32(rate), 0
        self.moments = {k: (np.zeros_like(v), np.zeros_like(v)) for k, v in self.parameters.items()}
        self.random = np.random.default_rng(seed)
        self.images = read_idx(MNIST / "t10k-images-idx3-ubyte.gz").reshape(-1, 784).astype(np.float32) / 255
        self.labels = read_idx(MNIST / "t10k-labels-idx1-ubyte.gz")

    def _parameters(self) -> dict[str, np.ndarray]:
        found = {t.name: numpy_helper.to_array(t).copy() for t in self.model.graph.initializer}
        for sparse in self.model.graph.sparse_initializer:
            dense = np.zeros(list(sparse.dims), np.float32)
            indices = numpy_helper.to_array(sparse.indices)
            at = tuple(indices.T) if indices.ndim == 2 else np.unravel_index(indices, dense.shape)
            dense[at] = numpy_helper.to_array(sparse.values)
            found[sparse.values.name] = dense
        return found

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradient of the cross entropy of one batch, dense, whatever the mask."""
        p = self.parameters
        chosen = self.random.integers(0, len(self.images), BATCH)
        x, label = self.images[chosen], self.labels[chosen]
        h1 = np.maximum(x @ p["fc1.weight"].T + p["fc1.bias"], 0)
        h2 = np.maximum(h1 @ p["fc2.weight"].T + p["fc2.bias"], 0)
        z = h2 @ p["fc3.weight"].T + p["fc3.bias"]
        e = np.exp(z - z.max(1, keepdims=True))
        d3 = e / e.sum(1, keepdims=True)
        d3[np.arange(BATCH), label] -= 1
        d3 /= BATCH
        d2 = (d3 @ p["fc3.weight"]) * (h2 > 0)
        d1 = (d2 @ p["fc2.weight"]) * (h1 > 0)
        return {"fc1.weight": d1.T @ x, "fc1.bias": d1.sum(0), "fc2.weight": d2.T @ h1, "fc2.bias": d2.sum(0),
                "fc3.weight": d3.T @ h2, "fc3.bias": d3.sum(0)}

    def train(self, steps: int) -> None:
        """Adam, beta 0.9 and 0.999, on the weights of the mask."""
        for _ in range(steps):
            self.step_count += 1
            for name, gradient in self.gradients().items():
                gradient = (gradient * self.masks[name]).astype(np.float32)
                first, second = self.moments[name]
                first += np.float32(0.1) * (gradient - first)
                second += np.float32(0.001) * (gradient * gradient - second)
                scale = self.rate / np.float32(1 - 0.9**self.step_count)
                root = np.sqrt(second / np.float32(1 - 0.999**self.step_count)) + np.float32(1e-8)
                self.parameters[name] -= scale * first / root * self.masks[name]

    def regrow(self, share: float = 0.01) -> None:
        """Drops the smallest non-zeros of each matrix and grows as many zeros, from 0, by one step."""
        gradients = self.gradients()
        for name, mask in self.masks.items():
            if not name.endswith("weight"):
                continue
            weight = self.parameters[name]
            on, off = np.flatnonzero(mask), np.flatnonzero(mask.reshape(-1) == 0)
            count = int(share * len(on))
            if count == 0 or count > len(off):
                continue
            dropped = on[np.argsort(np.abs(weight.reshape(-1)[on]))[:count]]
            grown = off[np.argsort(-np.abs(gradients[name].reshape(-1)[off]))[:count]]
            flat = weight.reshape(-1)
            flat[dropped] = 0
            flat[grown] = -self.rate * np.sign(gradients[name].reshape(-1)[grown])
            mask.reshape(-1)[dropped] = 0
            mask.reshape(-1)[grown] = 1

    def save_bf16(self, path: pathlib.Path) -> pathlib.Path:
        """Writes the weights as bf16 safetensors."""
        return write_safetensors(path, {k: to_bf16(v) for k, v in self.parameters.items()}, "BF16")

    def save_f32(self, path: pathlib.Path) -> pathlib.Path:
        """Writes the weights as f32 safetensors, dense with zeros inside, as frameworks save pruned models."""
        return write_safetensors(path, {k: v.astype(np.float32) for k, v in self.parameters.items()}, "F32")


def trained_pair(folder: pathlib.Path, model: str, dtype: str, steps: int, rate: float, regrow: bool = False):
    """Returns the checkpoints before and after `steps`, both after the warm-up."""
    mlp = Mlp(model, rate)
    mlp.train(WARM_UP)
    save = mlp.save_bf16 if dtype == "bf16" else mlp.save_f32
    before = save(folder / "old.safetensors")
    if regrow:
        mlp.regrow()
    mlp.train(steps)
    return before, save(folder / "new.safetensors")


def synthetic_pair(folder: pathlib.Path, mebibytes: int, sparsity: float, moved: float, rate: float = 3e-6):
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
    old = write_safetensors(folder / "old.safetensors", {"model.layers.0.mlp.weight": before}, "BF16")
    return old, write_safetensors(folder / "new.safetensors", {"model.layers.0.mlp.weight": after}, "BF16")


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


def measure(name: str, pair, bench: pathlib.Path, folder: pathlib.Path, rounds: int, known: dict | None) -> dict:
    """Returns the row of one pair; the other tools' part from `known`, if that is of the same pair."""
    old, new = pair
    run = subprocess.run([bench, old, new, f"--rounds={rounds}"], check=True, capture_output=True, text=True)
    row = {"pair": name, **json.loads(run.stdout)}
    if known and (known["changes"], known["nonzeros"]) == (row["changes"], row["nonzeros"]):
        row.update({key: value for key, value in known.items() if key.removesuffix("_s") in TOOLS})
    for tool in TOOLS:
        if tool in row:
            continue
        out = folder / f"patch.{tool}"
        row[f"{tool}_s"] = round(globals()[tool](old, new, out), 4)
        row[tool] = out.stat().st_size
    value_bytes = 2 if "bf16" in name else 4
    row["int32_bf16" if value_bytes == 2 else "int32_f32"] = (4 + value_bytes) * row["changes"]
    best = min(TOOLS, key=lambda tool: row[tool])
    row["best"], row["ratio"] = best, round(row["ours"] / row[best], 4)
    print(f"{name:34s} {row['changes']:9d} changes  ours {row['ours']:9d}  {best} {row[best]:9d}  ratio {row['ratio']:.3f}"
          f"  encode {row['bsdiff_s'] / row['encode_s']:.0f}x bsdiff"
          f"  decode {row['decode_ns'] / row['decode_allowed_ns']:.2f} of allowed", flush=True)
    return row


def pairs(slow: bool):
    """Yields names and makers of pairs."""
    for model in ("mnist_dense", "mnist_unstructured", "mnist_diagonal16"):
        short = model.removeprefix("mnist_")
        for dtype in ("bf16", "f32"):
            for steps in (1, 100):
                yield (f"{short} {dtype}, {steps} step{'s' * (steps > 1)}",
                       lambda f, m=model, d=dtype, s=steps: trained_pair(f, m, d, s, RATE))
    for dtype in ("bf16", "f32"):
        yield (f"unstructured {dtype}, regrow and 1 step",
               lambda f, d=dtype: trained_pair(f, "mnist_unstructured", d, 1, RATE, regrow=True))
    for size in (64, 1024) if slow else (64,):
        yield f"synthetic {size} MiB bf16, dense", lambda f, s=size: synthetic_pair(f, s, 0.0, 0.0)
        yield f"synthetic {size} MiB bf16, 90 % zeros", lambda f, s=size: synthetic_pair(f, s, 0.9, 0.0)
        yield f"synthetic {size} MiB bf16, 90 % zeros, moved", lambda f, s=size: synthetic_pair(f, s, 0.9, 0.001)


def device() -> str:
    """Returns the CPU's name and how many of them this process may use."""
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")]
    return f"{names[0]}, {len(names)} CPUs"


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/release/bin/updates_bench")
    parser.add_argument("--slow", action="store_true", help="also pairs of 1 GB")
    parser.add_argument("--ours", action="store_true", help="only ours; the other tools' part from --out")
    parser.add_argument("--only", default="", help="pairs whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    missing = [tool for tool in ("bsdiff", "xdelta3", "zstd") if not shutil.which(tool)]
    if missing or not args.bench.exists():
        print(f"missing: {' '.join(missing) or args.bench} (see --help)", file=sys.stderr)
        return 2
    rows, earlier = [], {}
    if args.out and args.out.exists():
        earlier = {row["pair"]: row for row in json.loads(args.out.read_text(encoding="utf-8"))["rows"]}
    for name, make in pairs(args.slow):
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            rows.append(measure(name, make(path), args.bench, path, args.rounds, earlier.get(name) if args.ours else None))
    print(f"geometric mean of ours / best tool: {geomean([row['ratio'] for row in rows]):.3f} over {len(rows)} pairs")
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        earlier.update({row["pair"]: row for row in rows})
        rows = [earlier[name] for name, _ in pairs(True) if name in earlier]
        result = {"device": device(), "commit": commit.stdout.strip(), "date": datetime.date.today().isoformat(),
                  "command": "tests/bench/updates_bytes.py", "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({k: v for k, v in result.items() if k != "rows"})[:-1] + ', "rows": [\n'
        args.out.write_text(text + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
