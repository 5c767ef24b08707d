"""MNIST as arrays: the idx reader and the augmentation on tensors.

An idx file is a big-endian header followed by unsigned bytes in row-major order:

    images   0x00000803, count, rows, columns, then count * rows * columns bytes
    labels   0x00000801, count,                then count bytes

This module needs numpy only; torch is imported where it is used, so that checking models does not
need it.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

IMAGE_SIDE = 28
PIXELS = IMAGE_SIDE * IMAGE_SIDE
CLASSES = 10

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """Reads one idx file of unsigned bytes, plain or gzip-compressed.

    Args:
      path: the file; a name that ends in `.gz` is decompressed.

    Returns:
      A uint8 array of the shape that the header states.

    Raises:
      ValueError: the header or the length is not that of an idx file of bytes.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        content = stream.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path}: not an idx file of unsigned bytes")
    rank = content[3]
    header_bytes = 4 + 4 * rank
    shape = struct.unpack(f">{rank}I", content[4:header_bytes])
    values = np.frombuffer(content, dtype=np.uint8, offset=header_bytes)
    if values.size != int(np.prod(shape)):
        raise ValueError(f"{path}: header says {shape}, file holds {values.size} values")
    return values.reshape(shape)


def read_mnist(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the images and labels of one part of MNIST.

    Args:
      folder: holds the idx files, plain or `.gz`, named `<part>-images-idx3-ubyte` or
        `<part>-images.idx3-ubyte`.
      part: "train" (60,000 images) or "t10k" (10,000).

    Returns:
      images: float32 [count, 784], pixel / 255.
      labels: int64 [count].

    Raises:
      FileNotFoundError: a file is missing; the message says what was looked for.
    """
    images = read_idx(_find(folder, f"{part}-images", "idx3-ubyte"))
    labels = read_idx(_find(folder, f"{part}-labels", "idx1-ubyte"))
    if images.shape[1:] != (IMAGE_SIDE, IMAGE_SIDE) or labels.shape != images.shape[:1]:
        raise ValueError(f"{folder}: images {images.shape} and labels {labels.shape} do not match")
    return images.reshape(-1, PIXELS).astype(np.float32) / 255.0, labels.astype(np.int64)


def _find(folder: Path, stem: str, ending: str) -> Path:
    names = [f"{stem}{dot}{ending}{gz}" for gz in ("", ".gz") for dot in ("-", ".")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder} holds none of {', '.join(names)}")


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turns, scales, shears and shifts every image by its own small random amount.

    The map from output to input coordinates, in units of half an image, is

        [x']   1  [cos a  -sin a] [1  h] [x]   [dx]
        [y'] = -  [sin a   cos a] [0  1] [y] + [dy]
               s

    with a within +-12 degrees, s within 0.9 .. 1.1, h within +-0.1, and a shift of at most 2 pixels
    each way. What comes in from outside the image is black.

    Args:
      images: float32 [count, 784] on any device.
      generator: the source of randomness, on the same device.

    Returns:
      A new tensor of the same shape.
    """
    import torch
    import torch.nn.functional as functional

    def uniform(limit: float) -> torch.Tensor:
        unit = torch.rand(len(images), device=images.device, generator=generator)
        return (2.0 * unit - 1.0) * limit

    angle = uniform(12.0 * np.pi / 180.0)
    inverse_scale = 1.0 / (1.0 + uniform(0.1))
    shear = uniform(0.1)
    pixel = 2.0 / IMAGE_SIDE
    cos, sin = torch.cos(angle) * inverse_scale, torch.sin(angle) * inverse_scale
    affine = torch.stack(
        [
            torch.stack([cos, cos * shear - sin, uniform(2.0 * pixel)], dim=1),
            torch.stack([sin, sin * shear + cos, uniform(2.0 * pixel)], dim=1),
        ],
        dim=1,
    )
    square = images.view(-1, 1, IMAGE_SIDE, IMAGE_SIDE)
    grid = functional.affine_grid(affine, list(square.shape), align_corners=False)
    moved = functional.grid_sample(square, grid, padding_mode="zeros", align_corners=False)
    return moved.view(-1, PIXELS)
