"""Linear layers pruned by magnitude, a little at a time, single weights or whole blocks.

    y = x . (W * mask)^T + bias

`prune_to(n)` keeps the n blocks of b x b with the largest root mean square of their weights (edge
blocks count only the weights that they have). A pruned block stays pruned: its score is zero.
The number that is kept falls from all N to K along the cubic of Zhu and Gupta (arXiv 1710.01878):

    kept(p) = K + (N - K) * (1 - p)^3,    p in [0, 1] the progress of the pruning phase.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from diagonal import block_grid, expand_blocks


class PrunedLinear(nn.Linear):
    """A linear layer with a mask over blocks of its weight."""

    def __init__(
        self, in_features: int, out_features: int, block: int = 1, keep: int | None = None
    ):
        """Starts with nothing pruned.

        Args:
          in_features, out_features: the sizes of W.
          block: b; 1 prunes single weights.
          keep: K, the blocks that are left at the end; None keeps all.
        """
        super().__init__(in_features, out_features)
        self.block = block
        rows, columns = block_grid((out_features, in_features), block)
        self.blocks = rows * columns
        self.keep = self.blocks if keep is None else keep
        self.register_buffer("mask", torch.ones(out_features, in_features))
        self.register_buffer("block_sizes", self._sum_blocks(torch.ones_like(self.weight.data)))

    def effective_weight(self) -> torch.Tensor:
        """Returns W * mask, [out, in]."""
        return self.weight * self.mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, in] to [tokens, out]."""
        return functional.linear(x, self.effective_weight(), self.bias)

    def scheduled_keep(self, progress: float) -> int:
        """Returns kept(p), rounded; see the head of this file."""
        left = (1.0 - min(progress, 1.0)) ** 3
        return self.keep + round((self.blocks - self.keep) * left)

    @torch.no_grad()
    def prune_to(self, keep: int) -> None:
        """Masks all but the `keep` blocks with the largest root mean square."""
        squares = self._sum_blocks(self.effective_weight().square())
        score = (squares / self.block_sizes).reshape(-1)
        order = torch.sort(score, descending=True, stable=True).indices
        chosen = torch.zeros_like(score)
        chosen[order[:keep]] = 1.0
        chosen = chosen.view_as(squares)
        self.mask.copy_(expand_blocks(chosen, self.block, tuple(self.weight.shape)))

    def _sum_blocks(self, matrix: torch.Tensor) -> torch.Tensor:
        rows, columns = block_grid(tuple(matrix.shape), self.block)
        edge = (0, columns * self.block - matrix.shape[1], 0, rows * self.block - matrix.shape[0])
        padded = functional.pad(matrix, edge)
        return padded.view(rows, self.block, columns, self.block).sum(dim=(1, 3))
