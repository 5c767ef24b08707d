"""KServe's SDK, unmodified, in a process of its own: it cannot be imported beside tritonclient."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import harness
import pytest

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


OVERLOAD = """
import asyncio, sys
import numpy as np
from kserve import InferInput, InferRequest, InferenceGRPCClient

async def main(url):
    client = InferenceGRPCClient(url=url)
    tensor = InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32), binary_data=True)
    request = InferRequest(model_name="slow", infer_inputs=[tensor])
    calls = (client.infer(request) for _ in range(8))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    print(sum(not isinstance(answer, Exception) for answer in answers))
    await client.close()

asyncio.run(main(sys.argv[1]))
"""


def received(server: harness.Espalierd) -> int:
    """ModelInfer RPCs that the server answered, with whatever code."""
    with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    counts = (line for line in lines if line.startswith("espalier_rpcs_total{"))
    return sum(int(float(line.split()[-1])) for line in counts if 'rpc="ModelInfer"' in line)


@pytest.mark.parametrize("flag", ["unavailable", "resource_exhausted"])
def test_its_retries_add_to_an_overload_only_where_the_operator_lets_them(repository, flag):
    # A second an execution; one waits, the rest is refused.
    config = """
      max_batch_size: 1
      dynamic_batching { default_queue_policy { max_queue_size: 1 } }
      parameters { key: "execute_delay_ms" value { string_value: "1000" } }
    """
    root = repository(slow={"1": harness.perceptron([4, 4]), "config.pbtxt": config})
    with harness.Espalierd(root, f"--queue_full_status={flag}") as server:
        command = [sys.executable, "-c", OVERLOAD, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        assert 1 <= int(done.stdout) < 8, done.stdout
        if flag == "resource_exhausted":
            assert received(server) == 8
        else:
            assert 8 < received(server) <= 24, "each up to three times"
