"""NumPy arrays to the protocol's raw bytes and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import ml_dtypes

    _BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:  # BF16 then reads as the bit patterns, uint16
    _BFLOAT16 = None

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": _BFLOAT16 if _BFLOAT16 is not None else np.dtype("<u2"),
}
_LENGTH = np.dtype("<u4")


@dataclasses.dataclass(frozen=True)
class Typed:
    """An array to be sent under a datatype that its dtype does not say.

    Without ml_dtypes this is how bfloat16 travels, as bit patterns:

        client.infer("model", {"x": Typed(bits.astype(np.uint16), "BF16")})
    """

    array: np.ndarray
    datatype: str


def datatype_of(array: np.ndarray) -> str:
    """Returns the protocol's name for the dtype of `array`."""
    if _BFLOAT16 is not None and array.dtype == _BFLOAT16:
        return "BF16"
    if array.dtype.kind in "OSU":
        return "BYTES"
    little = array.dtype.newbyteorder("<")
    for datatype, dtype in _DTYPES.items():
        if dtype == little:
            return datatype
    raise TypeError(f"dtype {array.dtype} cannot be sent; convert it, e.g. array.astype('float32')")


def _encode_element(element: Any) -> bytes:
    if isinstance(element, str):
        element = element.encode()
    if not isinstance(element, bytes):
        raise TypeError(
            f"elements of a BYTES tensor are bytes or str, got {type(element).__name__}"
        )
    return len(element).to_bytes(_LENGTH.itemsize, "little") + element


def encode(value: Any) -> tuple[str, list[int], bytes]:
    """Returns (datatype, shape, raw bytes) of an array, anything that becomes one, or a Typed."""
    array = np.asarray(value.array if isinstance(value, Typed) else value)
    datatype = value.datatype if isinstance(value, Typed) else datatype_of(array)
    shape = list(array.shape)
    if datatype == "BYTES":
        return datatype, shape, b"".join(_encode_element(element) for element in array.reshape(-1))
    dtype = _DTYPES.get(datatype)
    if dtype is None:
        raise ValueError(f"{datatype!r} is no datatype; expected one of {[*_DTYPES, 'BYTES']}")
    if array.dtype.itemsize != dtype.itemsize:
        raise TypeError(
            f"{datatype} has {dtype.itemsize} bytes an element, "
            f"{array.dtype} has {array.dtype.itemsize}"
        )
    return datatype, shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _decode_bytes(raw: bytes) -> list[bytes]:
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        start = offset + _LENGTH.itemsize
        end = start + int.from_bytes(raw[offset:start], "little")
        if start > len(raw) or end > len(raw):
            raise ValueError(f"BYTES element {len(elements)} is cut off")
        elements.append(raw[start:end])
        offset = end
    return elements


def decode(datatype: str, shape: Sequence[int], raw: bytes) -> np.ndarray:
    """Returns the array; ValueError when `raw` is not what datatype and shape say."""
    if datatype == "BYTES":
        elements = _decode_bytes(raw)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(shape)
    if datatype not in _DTYPES:
        raise ValueError(f"unknown datatype {datatype!r}")
    # A copy, so that the caller can write into it.
    return np.frombuffer(raw, dtype=_DTYPES[datatype]).reshape(shape).copy()
