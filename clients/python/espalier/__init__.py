"""Client for Espalier and other servers of the Open Inference Protocol over gRPC.

    import espalier, numpy as np

    with espalier.Client("127.0.0.1:8001") as client:
        result = client.infer("mnist_diagonal16", np.zeros((1, 784), np.float32))
        print(result.output.argmax(axis=1), "answered by version", result.version)

`espalier.aio.Client` is the same for asyncio, `espalier.updates` sends new weights to models that
serve. A call that fails raises `InferenceError` with the
gRPC status code and the server's message.
"""

from espalier import aio, updates
from espalier._calls import (
    InferResult,
    ModelMetadata,
    ModelStatus,
    ServerMetadata,
    TensorMetadata,
)
from espalier._client import Client
from espalier._errors import InferenceError
from espalier._tensors import Typed

__all__ = [
    "Client",
    "InferResult",
    "InferenceError",
    "ModelMetadata",
    "ModelStatus",
    "ServerMetadata",
    "TensorMetadata",
    "Typed",
    "aio",
    "updates",
]
