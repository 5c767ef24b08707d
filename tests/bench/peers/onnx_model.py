"""The model that every peer serves: an ONNX file run by onnxruntime, one input and one output.

The session keeps onnxruntime's own defaults (all cores, all graph optimisations): the fastest that a user of
the peer gets without tuning.
"""
import numpy
import onnxruntime


class OnnxModel:
    """One input [batch, in], one output [batch, out], both float32."""

    def __init__(self, path: str):
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.input, self.output = self.session.get_inputs()[0], self.session.get_outputs()[0]
        if len(self.session.get_inputs()) != 1 or len(self.session.get_outputs()) != 1:
            raise ValueError(f"{path}: expected one input and one output")

    @property
    def input_width(self) -> int:
        return self.input.shape[1]

    @property
    def output_width(self) -> int:
        return self.output.shape[1]

    def run(self, x: numpy.ndarray) -> numpy.ndarray:
        return self.session.run([self.output.name], {self.input.name: x})[0]
