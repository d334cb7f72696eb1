"""What one forward needs besides its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decodestep.accel.attention.base import AttentionBackend


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Handed down through every module of the model.

    `attention` has been prepared for the rows of this forward and owns the paged KV caches.
    """

    attention: AttentionBackend
