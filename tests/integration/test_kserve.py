"""KServe's SDK, unmodified, in a process of its own: it cannot be imported beside tritonclient."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, sys
import numpy as np
import grpc
from kserve import InferInput, InferRequest, InferenceGRPCClient
from kserve.errors import InvalidInput

async def main(url):
    client = InferenceGRPCClient(url=url)
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("mnist_dense")
    assert not await client.is_model_ready("nothing")
    x = np.random.default_rng(1).random((3, 784), np.float32)
    answers = []
    for binary in (True, False):
        tensor = InferInput("input", [3, 784], "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        result = await client.infer(InferRequest(model_name="mnist_dense", infer_inputs=[tensor]))
        assert result.model_name == "mnist_dense"
        answers.append(result.outputs[0].as_numpy())
        assert answers[-1].shape == (3, 10)
    np.testing.assert_array_equal(*answers)
    try:
        await client.infer(InferRequest(model_name="nothing", infer_inputs=[tensor]))
    except Exception as error:
        assert "NOT_FOUND" in str(error) or "nothing" in str(error), error
    else:
        raise AssertionError("an unknown model was answered")
    await client.close()

asyncio.run(main(sys.argv[1]))
print("fine")
"""


def test_health_and_inference_with_raw_and_typed_contents(server):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "fine\n", done.stderr[-3000:]
