"""How each slot samples: rows of persistent tensors."""

from __future__ import annotations

import torch

from decodestep.accel.sampler.params import SamplingParams


class SamplingState:
    """Sampling parameters by slot. What every draw needs is in tensors, gathered by slot at each step."""

    def __init__(
        self, num_slots: int, vocab_size: int, end_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids
        self.device = device
        self.params = [SamplingParams()] * num_slots

        def column(value: float) -> torch.Tensor:
            return torch.full((num_slots,), value, device=device)

        self.temperature = column(1.0)  # [slots] float32, as are all of these
        self.top_p = column(1.0)
        self.min_p = column(0.0)
        self.repetition = column(1.0)
        self.presence = column(0.0)
        self.frequency = column(0.0)
        # By slot: tokens [n] int64 and what is added to their logits [n], or None.
        self.bias: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_slots

    def set(self, slot: int, params: SamplingParams) -> None:
        """Write one slot."""
        self.params[slot] = params
        self.temperature[slot] = params.temperature or 1.0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.bias[slot] = None
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            self.bias[slot] = (
                torch.tensor(tokens, device=self.device),
                torch.tensor(values, dtype=torch.float32, device=self.device),
            )
