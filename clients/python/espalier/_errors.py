"""The one exception of this package."""

from __future__ import annotations

import grpc


class InferenceError(Exception):
    """A call that the server refused or that did not reach it.

    Attributes:
      code: the gRPC status code, e.g. `grpc.StatusCode.NOT_FOUND` for an unknown model.
      message: the server's text, or the transport's when there was no answer.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def from_rpc_error(error: grpc.RpcError) -> InferenceError:
    """Returns what `error` says, as an InferenceError."""
    return InferenceError(error.code(), error.details() or "the server gave no message")
