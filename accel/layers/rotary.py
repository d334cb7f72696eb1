"""Rotary position embedding: default, linear and yarn."""

from __future__ import annotations

import math

import torch

from decodestep.accel.config import RopeConfig


class RotaryEmbedding:
    """Turns positions into the factors that `rotate` takes. Frequencies are those of transformers."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        inverse, self._scale = _frequencies(config, head_dim)
        self._inverse_frequencies = inverse  # [head_dim / 2] float32

    def factors(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each [T, 1, head_dim], for positions [T]."""
        angles = torch.outer(positions.float(), self._inverse_frequencies)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return (
            torch.cat((cos, cos), -1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1),
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [T, heads, head_dim]."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), signed_sin)


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor of cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == "default":
        return plain, 1.0
    if config.kind == "linear":
        return plain / config.factor, 1.0
    return _yarn(config, head_dim, plain)


def _yarn(config: RopeConfig, head_dim: int, plain: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): high frequencies as they are, low ones interpolated, a ramp between."""
    original = config.original_max_position_embeddings
    if original is None:
        raise ValueError("yarn without original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return plain / config.factor * (1 - keep) + plain * keep, _yarn_scale(config)


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale is not None and config.mscale_all_dim is not None:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
