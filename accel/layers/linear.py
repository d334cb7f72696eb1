"""Matrix product with a weight in the layout that the processor's kernel likes best."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

# oneDNN picks the layout for this number of rows. Measured on AVX-512 with 1 to 1024 rows: one layout serves
# all of them, at least as fast as F.linear at 1 row and up to twice as fast at 2 to 16.
_ROWS_TO_PACK_FOR = 128


class Linear(torch.nn.Module):
    """y = x W^T + b for x [N, in_features], with float32 sums whatever the dtype."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), False)
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=dtype), False) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Bring the weight into oneDNN's layout and drop the original, where oneDNN computes in its dtype."""
        self._packed = packed(self.weight)
        if self._packed is not None:
            del self.weight

    @property
    def is_packed(self) -> bool:
        """Whether the weight is in the kernel's layout."""
        return self._packed is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in_features] to [N, out_features]."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return linear_packed(x, self._packed, self.bias)


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """A weight [out, in] in oneDNN's layout, or None where oneDNN does not compute in its dtype."""
    if not _is_packable(weight):
        return None
    out: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_TO_PACK_FOR)
    return out


def linear_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X W^T + b for a packed W."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _is_packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by this weight natively on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32
