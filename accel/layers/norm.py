"""Root mean square norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype), False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
