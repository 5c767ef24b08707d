"""Every call of the protocol as data: its name, its request, and what becomes of the response.

`Client` and `aio.Client` differ only in how they send a `Call`; what is sent and what is read is
written once, here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Generic, Optional, TypeVar, Union

import grpc
import numpy as np

from espalier import _tensors, _wire
from espalier._errors import InferenceError

T = TypeVar("T")
Parameter = Union[bool, int, float, str]
Inputs = Union[np.ndarray, _tensors.Typed, Sequence[Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class InferResult:
    """The answer to one request.

    Attributes:
      model: the model's name.
      version: the version that answered.
      id: the request's id.
      outputs: arrays by name, in the server's order.
      parameters: what the server adds to the answer.
    """

    model: str
    version: str
    id: str
    outputs: dict[str, np.ndarray]
    parameters: dict[str, Parameter]

    @property
    def output(self) -> np.ndarray:
        """The first output; the only one of most models."""
        return next(iter(self.outputs.values()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.outputs[name]


@dataclasses.dataclass(frozen=True)
class TensorMetadata:
    """An input or output of a model; -1 in the shape is a size that a request chooses."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ModelMetadata:
    """What a model takes and gives."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclasses.dataclass(frozen=True)
class ServerMetadata:
    """Who answers, and which extensions of the protocol it speaks."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelStatus:
    """A model of the repository; `reason` says why when `state` is not READY."""

    name: str
    version: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether requests for it are answered."""
        return self.state == "READY"


@dataclasses.dataclass(frozen=True)
class Call(Generic[T]):
    """One call: RPC name, request message, and the function that reads the response."""

    method: str
    request: Any
    read: Callable[[Any], T]

    @property
    def path(self) -> str:
        """The gRPC method's full name."""
        return f"/{_wire.SERVICE}/{self.method}"

    @property
    def response_class(self) -> Any:
        """The class of the response message."""
        return _wire.message_class(f"{self.method}Response")


def _call(method: str, read: Callable[[Any], T], /, **fields: Any) -> Call[T]:
    return Call(method, _wire.new(f"{method}Request", **fields), read)


def server_live() -> Call[bool]:
    return _call("ServerLive", lambda response: response.live)


def server_ready() -> Call[bool]:
    return _call("ServerReady", lambda response: response.ready)


def model_ready(model: str, version: str) -> Call[bool]:
    return _call("ModelReady", lambda response: response.ready, name=model, version=version)


def server_metadata() -> Call[ServerMetadata]:
    return _call("ServerMetadata", lambda r: ServerMetadata(r.name, r.version, tuple(r.extensions)))


def model_metadata(model: str, version: str) -> Call[ModelMetadata]:
    def tensors(messages: Any) -> tuple[TensorMetadata, ...]:
        return tuple(TensorMetadata(m.name, m.datatype, tuple(m.shape)) for m in messages)

    def read(response: Any) -> ModelMetadata:
        return ModelMetadata(
            response.name,
            tuple(response.versions),
            response.platform,
            tensors(response.inputs),
            tensors(response.outputs),
        )

    return _call("ModelMetadata", read, name=model, version=version)


def model_config(model: str, version: str) -> Call[Any]:
    return _call("ModelConfig", lambda response: response.config, name=model, version=version)


def model_statistics(model: str, version: str) -> Call[Any]:
    return _call("ModelStatistics", lambda r: list(r.model_stats), name=model, version=version)


def repository_index(ready_only: bool) -> Call[list[ModelStatus]]:
    def read(response: Any) -> list[ModelStatus]:
        return [ModelStatus(m.name, m.version, m.state, m.reason) for m in response.models]

    return _call("RepositoryIndex", read, ready=ready_only)


def _parameter(value: Parameter) -> Any:
    # bool before int, which it is too.
    for kind, field in ((bool, "bool"), (int, "int64"), (float, "double"), (str, "string")):
        if isinstance(value, kind):
            return _wire.new("InferParameter", **{f"{field}_param": value})
    raise TypeError(f"a parameter is bool, int, float or str, got {type(value).__name__}")


def _read_infer(response: Any) -> InferResult:
    raws = response.raw_output_contents
    if len(raws) != len(response.outputs):
        raise InferenceError(
            grpc.StatusCode.INTERNAL,
            f"the answer has {len(response.outputs)} outputs and {len(raws)} raw contents",
        )
    outputs = {}
    for tensor, raw in zip(response.outputs, raws):
        try:
            outputs[tensor.name] = _tensors.decode(tensor.datatype, tensor.shape, raw)
        except ValueError as error:
            message = f"the answer has a bad output {tensor.name!r}: {error}"
            raise InferenceError(grpc.StatusCode.INTERNAL, message) from error
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
        for key, value in response.parameters.items()
    }
    return InferResult(
        response.model_name, response.model_version, response.id, outputs, parameters
    )


def model_infer(
    model: str,
    inputs: Mapping[str, Any],
    version: str,
    outputs: Sequence[str],
    request_id: str,
    parameters: Mapping[str, Parameter],
) -> Call[InferResult]:
    call = _call("ModelInfer", _read_infer, model_name=model, model_version=version, id=request_id)
    for name, value in inputs.items():
        datatype, shape, raw = _tensors.encode(value)
        call.request.inputs.add(name=name, datatype=datatype, shape=shape)
        call.request.raw_input_contents.append(raw)
    for name in outputs:
        call.request.outputs.add(name=name)
    for key, parameter in parameters.items():
        call.request.parameters[key].CopyFrom(_parameter(parameter))
    return call


def only_input(metadata: ModelMetadata) -> str:
    """Returns the name of the model's input; ValueError if there are several to choose from."""
    if len(metadata.inputs) != 1:
        names = [tensor.name for tensor in metadata.inputs]
        raise ValueError(
            f"model {metadata.name!r} has inputs {names}; pass a dict of arrays by name"
        )
    return metadata.inputs[0].name


# Both directions unlimited here; protobuf's own limit is 2 GiB a message.
CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def check_url(url: str) -> str:
    """Returns `url`; ValueError if it can be no gRPC target."""
    if not url or url.startswith(("http://", "https://")):
        raise ValueError(
            f"{url!r} is no gRPC target; give host:port without a scheme, e.g. 127.0.0.1:8001"
        )
    return url


Timeout = Optional[float]
