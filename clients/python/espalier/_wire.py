"""The protocol's messages, made from descriptors in a pool of their own.

tritonclient, kserve and others register the same names (`inference.ModelInferRequest`, …) in
protobuf's default pool, each from a slightly different .proto; a second registration there raises
TypeError. A private pool never meets theirs, so any of them can share a process with this package,
imported in any order.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
UPDATE_PACKAGE = "espalier.v1"
UPDATE_SERVICE = f"{UPDATE_PACKAGE}.UpdateService"


def _load_pool() -> descriptor_pool.DescriptorPool:
    path = pathlib.Path(__file__).with_name("_protocol.binpb")
    try:
        serialized = path.read_bytes()
    except FileNotFoundError:
        raise ImportError(
            f"{path.name} is made while the package is installed; run: pip install ./clients/python"
        ) from None
    pool = descriptor_pool.DescriptorPool()
    # Imports come before their importers in a FileDescriptorSet.
    for file in descriptor_pb2.FileDescriptorSet.FromString(serialized).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _load_pool()


@functools.cache
def message_class(message: str, package: str = PACKAGE) -> type[Message]:
    """Returns the class of a message of the protocol, e.g. "ModelInferRequest"."""
    descriptor = _POOL.FindMessageTypeByName(f"{package}.{message}")
    if hasattr(message_factory, "GetMessageClass"):  # protobuf 4.22 and newer
        found: type[Message] = message_factory.GetMessageClass(descriptor)
        return found
    return message_factory.MessageFactory(_POOL).GetPrototype(descriptor)


def new(message: str, /, **fields: Any) -> Any:
    """Returns a new message with `fields` set."""
    return message_class(message)(**fields)


def new_update(message: str, /, **fields: Any) -> Any:
    """Returns a new message of the update service with `fields` set."""
    return message_class(message, UPDATE_PACKAGE)(**fields)


def enum_name(enum: str, number: int) -> str:
    """Returns the name of a value of an enum of the update service; the number if it has none."""
    values = _POOL.FindEnumTypeByName(f"{UPDATE_PACKAGE}.{enum}").values_by_number
    return values[number].name if number in values else str(number)
