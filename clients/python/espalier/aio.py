"""The asyncio client: `espalier.Client` with every method awaited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, TypeVar

import grpc
import grpc.aio

from espalier import _calls
from espalier._calls import Inputs, Parameter, Timeout
from espalier._errors import from_rpc_error

T = TypeVar("T")


class Client:
    """A connection to a server, for the tasks of one event loop.

        async with Client("127.0.0.1:8001") as client:
            result = await client.infer("mnist", images)
            many = await asyncio.gather(*(client.infer("mnist", batch) for batch in batches))

    Arguments and errors are those of `espalier.Client`. Cancelling a task cancels its call.
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
            grpc.aio.secure_channel(target, credentials, all_options)
            if credentials is not None
            else grpc.aio.insecure_channel(target, all_options)
        )
        self._timeout = timeout
        self._metadata = tuple(metadata)
        self._methods: dict[str, Callable[..., Any]] = {}
        self._input_names: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        await self._channel.close(None)

    async def infer(
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
        """Runs a model; arguments and result are those of `espalier.Client.infer`."""
        key = (model, version)
        if not isinstance(inputs, Mapping):
            if key not in self._input_names:
                metadata = await self.model_metadata(model, version, timeout=timeout)
                self._input_names[key] = _calls.only_input(metadata)
            inputs = {self._input_names[key]: inputs}
        call = _calls.model_infer(model, inputs, version, outputs, request_id, parameters or {})
        try:
            return await self._send(call, timeout)
        except Exception:
            # A reloaded model may have renamed its input: ask again next time.
            self._input_names.pop(key, None)
            raise

    async def is_live(self, *, timeout: Timeout = None) -> bool:
        """Whether the server runs."""
        return await self._send(_calls.server_live(), timeout)

    async def is_ready(self, *, timeout: Timeout = None) -> bool:
        """Whether the server takes requests."""
        return await self._send(_calls.server_ready(), timeout)

    async def is_model_ready(
        self, model: str, version: str = "", *, timeout: Timeout = None
    ) -> bool:
        """Whether the model takes requests; False for one that the server does not know."""
        return await self._send(_calls.model_ready(model, version), timeout)

    async def server_metadata(self, *, timeout: Timeout = None) -> _calls.ServerMetadata:
        """The server's name, version and extensions."""
        return await self._send(_calls.server_metadata(), timeout)

    async def model_metadata(
        self, model: str, version: str = "", *, timeout: Timeout = None
    ) -> _calls.ModelMetadata:
        """Names, datatypes and shapes of a model's inputs and outputs."""
        return await self._send(_calls.model_metadata(model, version), timeout)

    async def model_config(self, model: str, version: str = "", *, timeout: Timeout = None) -> Any:
        """The model's configuration, an `inference.ModelConfig` message."""
        return await self._send(_calls.model_config(model, version), timeout)

    async def statistics(
        self, model: str = "", version: str = "", *, timeout: Timeout = None
    ) -> Any:
        """Counts and durations, `inference.ModelStatistics` a model; of all without a name."""
        return await self._send(_calls.model_statistics(model, version), timeout)

    async def models(
        self, *, ready_only: bool = False, timeout: Timeout = None
    ) -> list[_calls.ModelStatus]:
        """The models of the repository with their states."""
        return await self._send(_calls.repository_index(ready_only), timeout)

    async def _send(self, call: _calls.Call[T], timeout: Timeout) -> T:
        method = self._methods.get(call.method)
        if method is None:
            method = self._methods[call.method] = self._channel.unary_unary(
                call.path,
                request_serializer=type(call.request).SerializeToString,
                response_deserializer=call.response_class.FromString,
            )
        try:
            response = await method(
                call.request,
                timeout=self._timeout if timeout is None else timeout,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return call.read(response)
