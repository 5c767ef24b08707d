"""Models that tell which content answered, and clients that never stop asking."""

from __future__ import annotations

import pathlib
import re
import threading
import time
import urllib.request
from typing import Callable

import espalier
import harness
import numpy as np


def scaling_model(factor: float, size: int = 4) -> bytes:
    """Returns a model x [N, size] -> y [N, size], y = factor * x."""
    return harness.perceptron([size, size], lambda out, wide: factor * np.eye(out, wide))


def factor_of(client: espalier.Client, name: str, size: int = 4, **kwargs: object) -> float:
    """Asks a scaling model for its factor."""
    return float(client.infer(name, np.ones((1, size), np.float32), **kwargs).output[0, 0])


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until it holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


class Traffic:
    """Threads that ask a scaling model without a pause, each on a connection of its own.

    Attributes:
      answers: per thread, (version, factor) in order.
      errors: what went wrong.
    """

    def __init__(self, url: str, name: str, threads: int = 4, size: int = 4) -> None:
        self.answers: list[list[tuple[int, float]]] = [[] for _ in range(threads)]
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(url, name, size, own)) for own in self.answers
        ]

    def _ask(self, url: str, name: str, size: int, own: list) -> None:
        with espalier.Client(url, timeout=60) as client:
            while not self._stop.is_set():
                try:
                    result = client.infer(name, np.ones((1, size), np.float32))
                    own.append((int(result.version), float(result.output[0, 0])))
                except espalier.InferenceError as error:
                    self.errors.append(error)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        eventually(lambda: all(self.answers) or self.errors)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)


def in_flight(server: harness.Espalierd) -> int:
    """Requests that have come and are not answered."""
    with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=60) as response:
        text = response.read().decode()
    return int(re.search(r"^espalier_requests_in_flight (\d+)$", text, re.M)[1])


def resident_bytes(server: harness.Espalierd) -> int:
    """Returns the memory of the server's process."""
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024
