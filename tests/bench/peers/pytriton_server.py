#!/usr/bin/env python3
"""Serves an ONNX file with nvidia-pytriton: the real tritonserver, its dynamic batcher, onnxruntime in a Python model.

    pytriton_server.py NAME MODEL.onnx GRPC_PORT [MAX_BATCH_SIZE]

Runs until it is ended. Needs the Python of requirements-pytriton.txt (Debian's own python3: its library is the one
that Triton's Python backend brings along).
"""
import sys

import numpy
from onnx_model import OnnxModel
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig


def main(name: str, path: str, grpc_port: str, max_batch_size: str = "256") -> None:
    model = OnnxModel(path)

    @batch
    def infer(**inputs):
        return [model.run(inputs[model.input.name])]

    port = int(grpc_port)
    config = TritonConfig(grpc_address="127.0.0.1", grpc_port=port, http_address="127.0.0.1", http_port=port + 1,
                          metrics_port=port + 2, log_verbose=0)
    # Without restrictions, so that the client may ask for statistics as it does of the others.
    with Triton(config=config, security_config=TritonSecurityConfig(restricted_endpoints=[])) as triton:
        triton.bind(name, infer,
                    inputs=[Tensor(name=model.input.name, dtype=numpy.float32, shape=(model.input_width,))],
                    outputs=[Tensor(name=model.output.name, dtype=numpy.float32, shape=(model.output_width,))],
                    config=ModelConfig(max_batch_size=int(max_batch_size), batcher=DynamicBatcher()))
        triton.serve()


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
