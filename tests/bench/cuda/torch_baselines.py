#!/usr/bin/env python3
"""Adds PyTorch's sparse products to the rows of a linear_gpu result, on the same GPU, right after it.

    python3 tests/bench/cuda/torch_baselines.py FILE.json [--seconds S]

  torch_bsr_us   torch.nn.functional.linear with a BSR weight (PyTorch's Triton kernels), for blocks of 16 and more in bf16:
                 blocks at random places, as many as the row has
  cusparselt_us  2:4 through cuSPARSELt, the best of its algorithm search (torch._cslt_sparse_mm), for bf16 rows whose shape
                 it takes; always half the values, whatever the row's sparsity

Both replayed from CUDA graphs of 20 launches, cold rows walking over copies as linear_gpu does; medians. What a library does
not run is left out of the row. Needs PyTorch with CUDA; nothing else of the project does.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

LAUNCHES, COLD_BYTES, MAX_COPIES = 20, 256 << 20, 20


def measure(runs: list, seconds: float) -> float:
    """Microseconds a call, median over replays of a graph that calls `runs` in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(LAUNCHES):
            runs[i % len(runs)]()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples, stop = [], time.monotonic() + seconds
    graph.replay()
    while len(samples) < 4 or (time.monotonic() < stop and len(samples) < 100):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(samples)


def copies_of(row: dict, values: float) -> int:
    if row["state"] == "warm":
        return 1
    touched = 2 * (values + row["M"] * (row["K"] + row["N"]))
    return max(2, min(MAX_COPIES, -(-COLD_BYTES // int(touched))))


def block_sparse(row: dict, seconds: float) -> float:
    block, out, width = row["block"], row["N"], row["K"]
    rows, columns = out // block, width // block
    kept = max(1, round((1 - row["sparsity"]) * columns))
    x = [torch.randn(row["M"], width, device="cuda", dtype=torch.bfloat16)
         for _ in range(copies_of(row, rows * kept * block * block))]
    order = torch.rand(rows, columns, device="cuda").argsort(dim=1)[:, :kept].sort(dim=1).values
    starts = torch.arange(0, rows * kept + 1, kept, device="cuda", dtype=torch.int32)
    weights = [torch.sparse_bsr_tensor(starts, order.reshape(-1).to(torch.int32),
                                       torch.randn(rows * kept, block, block, device="cuda", dtype=torch.bfloat16),
                                       size=(out, width)) for _ in x]
    linear = torch.nn.functional.linear
    return measure([lambda a=a, w=w: linear(a, w) for a, w in zip(x, weights)], seconds)


def two_four(row: dict, seconds: float) -> float:
    out, width, tokens = row["N"], row["K"], row["M"]
    mask = torch.tensor([1, 1, 0, 0], device="cuda", dtype=torch.bfloat16).repeat(out, width // 4)
    weights = [torch._cslt_compress(torch.randn(out, width, device="cuda", dtype=torch.bfloat16) * mask)
               for _ in range(copies_of(row, out * width * 9 / 16))]
    x = [torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).t() for _ in weights]
    best = torch._cslt_sparse_mm_search(weights[0], x[0])
    return measure([lambda w=w, a=a: torch._cslt_sparse_mm(w, a, alg_id=best) for w, a in zip(weights, x)], seconds)


def save(results: dict, file: pathlib.Path) -> None:
    head = {key: value for key, value in results.items() if key != "rows"}
    text = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    rows = ",\n".join("  " + json.dumps(row) for row in results["rows"])
    file.write_text(f"{{{text},\n \"rows\": [\n{rows}\n ]}}\n", encoding="utf-8")


def fill(results: dict, seconds: float, file: pathlib.Path) -> None:
    """Saves as it goes, so that a run cut short keeps what it has."""
    known: dict[tuple, dict] = {}
    for row in results["rows"]:
        if row["dtype"] != "bf16" or row["layers"] != 1:
            continue
        columns = {("cusparselt_us", row["M"], row["K"], row["N"], row["state"]): two_four}
        if row["block"] >= 16 and row["K"] % row["block"] == 0 and row["N"] % row["block"] == 0:
            columns["torch_bsr_us", row["M"], row["K"], row["N"], row["state"], row["block"],
                    round(row["sparsity"], 3)] = block_sparse
        for key, function in columns.items():
            if key not in known:
                try:
                    known[key] = function(row, seconds)
                    print(f"{key}: {known[key]:.2f}", flush=True)
                except Exception as error:  # pylint: disable=broad-except  # whatever the library refuses
                    known[key] = None
                    print(f"{key}: {str(error).splitlines()[0][:150]}", file=sys.stderr, flush=True)
                torch.cuda.empty_cache()
            if known[key] is not None:
                row[key[0]] = round(known[key], 3)
        save(results, file)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("file", type=pathlib.Path)
    arguments.add_argument("--seconds", type=float, default=0.1)
    options = arguments.parse_args()
    results = json.loads(options.file.read_text(encoding="utf-8"))
    results["command"] += f"; torch_baselines.py --seconds {options.seconds:g} (PyTorch {torch.__version__})"
    fill(results, options.seconds, options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
