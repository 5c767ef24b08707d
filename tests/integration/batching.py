"""Models with a batching configuration, and what the server says about how it ran them."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Callable

import grpc
import harness
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

DENSE = harness.model_path("mnist_dense")


def model(config: str, execute_delay_ms: int = 0) -> dict[str, bytes | str]:
    """Returns the files of a shipped model with `config`, for the fixture `repository`."""
    delay = (
        f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{execute_delay_ms}" }} }}'
    )
    return {"1": DENSE.read_bytes(), "config.pbtxt": f"{config}\n{delay if execute_delay_ms else ''}"}


@dataclasses.dataclass
class Answer:
    """How a request ended, and when."""

    code: grpc.StatusCode
    details: str
    sent: float
    answered: float
    logits: np.ndarray | None = None

    @property
    def seconds(self) -> float:
        """From sending to the answer."""
        return self.answered - self.sent


class Pending:
    """A request on its way."""

    def __init__(self, send: Callable[[], grpc.Future]) -> None:
        self.sent = time.monotonic()  # before: the server may see the request before send returns
        self.answered = 0.0
        self.call = send()
        self._done = threading.Event()
        self.call.add_done_callback(self._end)

    def _end(self, _: grpc.Future) -> None:
        self.answered = time.monotonic()
        self._done.set()

    def answer(self) -> Answer:
        """Waits for the end."""
        assert self._done.wait(60)
        logits = None
        if self.call.code() == grpc.StatusCode.OK:
            (raw,) = self.call.result().raw_output_contents
            logits = np.frombuffer(raw, np.float32).reshape(-1, 10)
        return Answer(
            self.call.code(), self.call.details() or "", self.sent, self.answered, logits
        )


class Model:
    """One model of a running server."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, name: str) -> None:
        self.stub = stub
        self.name = name

    def send(
        self, images: np.ndarray | int = 1, deadline: float | None = None, **parameters: int
    ) -> Pending:
        """Sends images, or as many blank ones; `deadline` is the call's, in seconds from now."""
        if isinstance(images, int):
            images = np.zeros((images, 784), np.float32)
        request = service_pb2.ModelInferRequest(model_name=self.name)
        request.inputs.add(name="input", datatype="FP32", shape=images.shape)
        request.raw_input_contents.append(images.tobytes())
        for key, value in parameters.items():
            request.parameters[key].uint64_param = value
        return Pending(lambda: self.stub.ModelInfer.future(request, timeout=deadline))

    def statistics(self) -> service_pb2.ModelStatistics:
        """What the server has counted."""
        request = service_pb2.ModelStatisticsRequest(name=self.name)
        return self.stub.ModelStatistics(request).model_stats[0]

    def batches(self) -> dict[int, int]:
        """Executions by batch size, so far."""
        return {int(b.batch_size): int(b.compute_infer.count) for b in self.statistics().batch_stats}

    def occupy(self, seconds: float = 0.2) -> Pending:
        """Sends a request and gives it time to be at the instance, where it stays for a while."""
        running = self.send()
        time.sleep(seconds)
        return running
