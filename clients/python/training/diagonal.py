"""Linear layers whose weight is a sum of a few cyclic block-diagonals, chosen while training.

The weight W is [out, in], cut into blocks of b x b: R = ceil(out / b) block rows and
C = ceil(in / b) block columns, edge blocks cropped. Block-diagonal o in [0, P), P = max(R, C),
holds the D = min(R, C) blocks

    R >= C:  row = (t + o) mod R, col = t        R < C:  row = t, col = (t + o) mod C

for t in [0, D). Every block lies on exactly one of them, so the values of all diagonals together
are one dense [out, in] parameter V, and

    y = x . W^T + bias,    W[i, j] = a[o(i, j)] * V[i, j].

While training, a is differentiable TopK (DynaDiag, arXiv 2506.11449): a learned score alpha[o] for
each diagonal and a temperature T that falls,

    a = clamp(K * softmax(alpha / T), 0, 1).

`freeze` ends this: the K diagonals with the largest alpha get a = 1 exactly, the others 0, and only
V is trained from then on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def block_grid(shape: tuple[int, int], block: int) -> tuple[int, int]:
    """Returns (R, C), the block rows and block columns of an [out, in] matrix."""
    return -(-shape[0] // block), -(-shape[1] // block)


def offset_of_block(rows: int, columns: int) -> np.ndarray:
    """Returns int64 [R, C]: the offset of the block-diagonal on which each block lies."""
    row, col = np.indices((rows, columns))
    return (row - col) % rows if rows >= columns else (col - row) % columns


def blocks_of_offset(rows: int, columns: int) -> np.ndarray:
    """Returns int64 [P, D]: the blocks of each block-diagonal, as row * C + col, in order of t."""
    offset = np.arange(max(rows, columns))[:, None]
    t = np.arange(min(rows, columns))[None, :]
    row, col = ((t + offset) % rows, t) if rows >= columns else (t, (t + offset) % columns)
    return row * columns + col


def expand_blocks(per_block: torch.Tensor, block: int, shape: tuple[int, int]) -> torch.Tensor:
    """Repeats [R, C] over the elements of each block and crops the result to `shape`."""
    rows, columns = per_block.shape
    wide = per_block[:, None, :, None].expand(rows, block, columns, block)
    return wide.reshape(rows * block, columns * block)[: shape[0], : shape[1]]


class _SpreadOffsets(torch.autograd.Function):
    """[P] -> [R, C]: each block gets the value of its diagonal.

    Autograd's own gradient of an indexing adds in an order that is not fixed on a GPU. Here it is
    a gather along each diagonal and a sum, the same on every run.
    """

    @staticmethod
    def forward(ctx, per_offset, offset_of, blocks_of):
        ctx.save_for_backward(blocks_of)
        return per_offset[offset_of]

    @staticmethod
    def backward(ctx, gradient):
        (blocks_of,) = ctx.saved_tensors
        return gradient.reshape(-1)[blocks_of].sum(dim=1), None, None


class DiagonalLinear(nn.Module):
    """y = x . W^T + bias with W on K block-diagonals; see the formulas at the head of this file.

    Attributes:
      values: V, [out, in].
      alpha: the scores, [P].
      bias: [out].
      temperature: T; the training loop sets it.
      selected: the sorted offsets, int64 [K], once frozen; None before.
    """

    def __init__(self, in_features: int, out_features: int, block: int, keep: int):
        """Starts with all diagonals in play.

        Args:
          in_features, out_features: the sizes of W.
          block: b; 1 gives scattered diagonals of single weights.
          keep: K.
        """
        super().__init__()
        self.shape = (out_features, in_features)
        self.block = block
        self.keep = keep
        self.temperature = 1.0
        self.selected: torch.Tensor | None = None
        rows, columns = block_grid(self.shape, block)
        offsets = max(rows, columns)
        # He initialisation for the fan-in that is left when K of P diagonals are kept.
        deviation = math.sqrt(2.0 / (in_features * keep / offsets))
        self.values = nn.Parameter(torch.randn(self.shape) * deviation)
        self.alpha = nn.Parameter(torch.full((offsets,), 1.0 / offsets))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.register_buffer("offset_of", torch.from_numpy(offset_of_block(rows, columns)))
        self.register_buffer("blocks_of", torch.from_numpy(blocks_of_offset(rows, columns)))
        self.register_buffer("mask", torch.ones(self.shape))

    def soft_selection(self) -> torch.Tensor:
        """Returns a = clamp(K * softmax(alpha / T), 0, 1), [P]."""
        share = functional.softmax(self.alpha / self.temperature, dim=0)
        return torch.clamp(self.keep * share, 0.0, 1.0)

    def effective_weight(self) -> torch.Tensor:
        """Returns W, [out, in]."""
        if self.selected is not None:
            return self.values * self.mask
        return self.values * self._spread(self.soft_selection())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, in] to [tokens, out]."""
        return functional.linear(x, self.effective_weight(), self.bias)

    @torch.no_grad()
    def freeze(self) -> None:
        """Keeps the K diagonals with the largest alpha, with weight exactly 1.

        The last a is multiplied into V first, so that W does not jump on the diagonals that stay;
        not below K / P, where a starts, so that no diagonal enters the last phase at zero.
        """
        order = torch.sort(self.alpha, descending=True, stable=True).indices
        self.selected = torch.sort(order[: self.keep]).values
        chosen = torch.zeros_like(self.alpha)
        chosen[self.selected] = 1.0
        floor = self.keep / len(self.alpha)
        self.values.mul_(self._spread(self.soft_selection().clamp(min=floor)))
        self.mask.copy_(self._spread(chosen))
        self.alpha.requires_grad_(False)

    def _spread(self, per_offset: torch.Tensor) -> torch.Tensor:
        per_block = _SpreadOffsets.apply(per_offset, self.offset_of, self.blocks_of)
        return expand_blocks(per_block, self.block, self.shape)


def annealed_temperature(progress: float, hot: float = 10.0, cold: float = 0.1) -> float:
    """T = cold + (hot - cold) * (1 + cos(pi * progress)) / 2 for progress in [0, 1]."""
    return cold + 0.5 * (hot - cold) * (1.0 + math.cos(math.pi * progress))
