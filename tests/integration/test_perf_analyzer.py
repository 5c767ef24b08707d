"""Triton's perf_analyzer, unmodified, against the server.

Its wheel (perf-analyzer on PyPI) needs glibc 2.38, which Debian 12 has not, and dlopens libcudart.so for shared memory; name a command that starts it, say inside
a Debian 13 root that shares /dev and the network, and these tests run:

    ESPALIER_PERF_ANALYZER="chroot /srv/trixie /opt/pa/bin/perf_analyzer" pytest tests/integration/test_perf_analyzer.py
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import harness
import pytest

COMMAND = shlex.split(os.environ.get("ESPALIER_PERF_ANALYZER", ""))
pytestmark = pytest.mark.skipif(not COMMAND, reason="ESPALIER_PERF_ANALYZER names no perf_analyzer")

MODES = {
    "sync": "",
    "async": "--async",
    "streaming": "--async --streaming",
    "batch 4": "-b 4",
    "concurrency 16": "--async --concurrency-range 16",
    "batch 4, concurrency 16, streaming": "--async --streaming -b 4 --concurrency-range 16",
    "request rate": "--request-rate-range 200",
    "shared memory": "--shared-memory system",
    "shared memory, batch 4, concurrency 16": "--shared-memory system -b 4 --async --concurrency-range 16",
    "metrics": "--collect-metrics --metrics-interval 200",
}


@pytest.fixture(scope="module")
def shm_server():
    with harness.Espalierd(harness.MODELS, "--allow_system_shared_memory") as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
def test_measures(shm_server, mode):
    metrics = ["--metrics-url", f"{shm_server.metrics_url.removeprefix('http://')}/metrics/triton"]
    run = subprocess.run(
        [*COMMAND, "-m", "mnist_block16", "-u", shm_server.url, "-i", "grpc", "--service-kind", "triton",
         "-p", "500", "-r", "6", "-s", "999", *shlex.split(MODES[mode]), *(metrics if mode == "metrics" else [])],
        capture_output=True, text=True, timeout=120, check=False,
    )
    output = run.stdout + run.stderr
    throughput = re.search(r"throughput: ([0-9.]+) infer/sec", output)
    assert throughput and float(throughput[1]) > 0, output
    # The launcher answers 0 whatever happened; these do not.
    assert not re.search(r"error|terminate called|failed", output, re.IGNORECASE), output
