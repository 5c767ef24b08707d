"""The blocking client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, TypeVar

import grpc

from espalier import _calls
from espalier._calls import Inputs, Parameter, Timeout
from espalier._errors import from_rpc_error

T = TypeVar("T")


class Client:
    """A connection to a server; safe to share between threads.

        with Client("127.0.0.1:8001") as client:
            client.infer("mnist", images).output                 # the model's one input and output
            client.infer("nlp", {"ids": ids, "mask": mask})["logits"]

    Args:
      url: "host:port" or another gRPC target ("unix:/path").
      timeout: seconds that a call may take when it does not say; None for no limit.
      credentials: from `grpc.ssl_channel_credentials`; None for plain text.
      metadata: (key, value) pairs sent with every call, e.g. an authorization token.
      options: further gRPC channel options.

    Every method raises InferenceError when the server refuses or cannot be reached.
    """

    def __init__(
        self,
        url: str = "127.0.0.1:8001",
        *,
        timeout: Timeout = 60.0,
        credentials: Optional[grpc.ChannelCredentials] = None,
        metadata: Sequence[tuple[str, str]] = (),
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        target, all_options = _calls.check_url(url), [*_calls.CHANNEL_OPTIONS, *options]
        self._channel = (
            grpc.secure_channel(target, credentials, all_options)
            if credentials is not None
            else grpc.insecure_channel(target, all_options)
        )
        self._timeout = timeout
        self._metadata = tuple(metadata)
        self._methods: dict[str, Callable[..., Any]] = {}
        self._input_names: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        self._channel.close()

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        parameters: Optional[Mapping[str, Parameter]] = None,
        timeout: Timeout = None,
    ) -> _calls.InferResult:
        """Runs a model.

        Args:
          model: its name.
          inputs: an array for the model's only input, or arrays by input name. The dtype is sent
            as it is (float64 is FP64): convert to what the model takes.
          version: "" for the one that the server serves by default.
          outputs: names of the outputs wanted; all when empty.
          request_id: echoed in the result.
          parameters: of the request, e.g. {"timeout": 5000} (microseconds in the queue).
          timeout: seconds for this call; None for the client's.

        Returns:
          The outputs and who answered.
        """
        key = (model, version)
        if not isinstance(inputs, Mapping):
            if key not in self._input_names:
                metadata = self.model_metadata(model, version, timeout=timeout)
                self._input_names[key] = _calls.only_input(metadata)
            inputs = {self._input_names[key]: inputs}
        call = _calls.model_infer(model, inputs, version, outputs, request_id, parameters or {})
        try:
            return self._send(call, timeout)
        except Exception:
            # A reloaded model may have renamed its input: ask again next time.
            self._input_names.pop(key, None)
            raise

    def is_live(self, *, timeout: Timeout = None) -> bool:
        """Whether the server runs."""
        return self._send(_calls.server_live(), timeout)

    def is_ready(self, *, timeout: Timeout = None) -> bool:
        """Whether the server takes requests."""
        return self._send(_calls.server_ready(), timeout)

    def is_model_ready(self, model: str, version: str = "", *, timeout: Timeout = None) -> bool:
        """Whether the model takes requests; False for one that the server does not know."""
        return self._send(_calls.model_ready(model, version), timeout)

    def server_metadata(self, *, timeout: Timeout = None) -> _calls.ServerMetadata:
        """The server's name, version and extensions."""
        return self._send(_calls.server_metadata(), timeout)

    def model_metadata(
        self, model: str, version: str = "", *, timeout: Timeout = None
    ) -> _calls.ModelMetadata:
        """Names, datatypes and shapes of a model's inputs and outputs."""
        return self._send(_calls.model_metadata(model, version), timeout)

    def model_config(self, model: str, version: str = "", *, timeout: Timeout = None) -> Any:
        """The model's configuration, an `inference.ModelConfig` message."""
        return self._send(_calls.model_config(model, version), timeout)

    def statistics(self, model: str = "", version: str = "", *, timeout: Timeout = None) -> Any:
        """Counts and durations, `inference.ModelStatistics` a model; of all without a name."""
        return self._send(_calls.model_statistics(model, version), timeout)

    def models(
        self, *, ready_only: bool = False, timeout: Timeout = None
    ) -> list[_calls.ModelStatus]:
        """The models of the repository with their states."""
        return self._send(_calls.repository_index(ready_only), timeout)

    def _send(self, call: _calls.Call[T], timeout: Timeout) -> T:
        method = self._methods.get(call.method)
        if method is None:
            method = self._methods[call.method] = self._channel.unary_unary(
                call.path,
                request_serializer=type(call.request).SerializeToString,
                response_deserializer=call.response_class.FromString,
            )
        try:
            response = method(
                call.request,
                timeout=self._timeout if timeout is None else timeout,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return call.read(response)
