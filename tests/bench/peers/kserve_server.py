#!/usr/bin/env python3
"""Serves an ONNX file with the KServe Python model server over the Open Inference Protocol (gRPC).

    kserve_server.py NAME MODEL.onnx GRPC_PORT

Runs until it is ended. Needs the Python of requirements-kserve.txt.
"""
import logging
import sys

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.logging import logger, trace_logger
from onnx_model import OnnxModel


class Served(Model):
    def __init__(self, name: str, path: str):
        super().__init__(name)
        self.model = OnnxModel(path)
        self.ready = True

    def get_input_types(self):
        return [{"name": self.model.input.name, "datatype": "FP32", "shape": [-1, self.model.input_width]}]

    def get_output_types(self):
        return [{"name": self.model.output.name, "datatype": "FP32", "shape": [-1, self.model.output_width]}]

    def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        y = self.model.run(payload.inputs[0].as_numpy())
        output = InferOutput(name=self.model.output.name, shape=list(y.shape), datatype="FP32")
        output.set_data_from_numpy(y)
        return InferResponse(response_id=payload.id, model_name=self.name, infer_outputs=[output])


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    name, path, port = sys.argv[1:]
    server = ModelServer(http_port=int(port) + 1, grpc_port=int(port), enable_latency_logging=False)
    for noisy in (logger, trace_logger):  # a line for every request would be measured with it
        noisy.setLevel(logging.WARNING)
    server.start([Served(name, path)])
