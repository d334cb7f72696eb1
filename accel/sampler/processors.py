"""Penalties, bias and masks: what changes logits before a token is chosen."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sampler.state import SamplingState


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of one draw, in the order of the logits."""

    slots: list[int]
    lengths: list[int]  # tokens fed, which is the position of the token to be sampled
    prompt_lengths: list[int]  # leading tokens that were given
    bitmasks: dict[int, npt.NDArray[np.uint32]]  # by row: allowed tokens, packed words of 32

    def take(self, rows: list[int]) -> SampleRows:
        """Some of the rows."""
        return SampleRows(
            [self.slots[row] for row in rows],
            [self.lengths[row] for row in rows],
            [self.prompt_lengths[row] for row in rows],
            {at: self.bitmasks[row] for at, row in enumerate(rows) if row in self.bitmasks},
        )


class Processors:
    """Applies everything that comes before the temperature, in the order of sampling.proto."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._counts = torch.zeros(0, state.vocab_size, device=state.device)  # all zero between calls

    def apply(self, logits: torch.Tensor, rows: SampleRows, history: torch.Tensor) -> torch.Tensor:
        """Processed logits [R, vocab]; `logits` itself if no row asks for anything.

        history [slots, context] int32 holds the tokens fed.
        """
        params = [self._state.params[slot] for slot in rows.slots]
        penalised = [row for row, p in enumerate(params) if _is_penalised(p)]
        biased = [
            (row, bias) for row, slot in enumerate(rows.slots) if (bias := self._state.bias[slot]) is not None
        ]
        early = [
            row for row, p in enumerate(params) if rows.lengths[row] - rows.prompt_lengths[row] < p.min_tokens
        ]
        if not (penalised or biased or early or rows.bitmasks):
            return logits
        work = logits.clone()
        if penalised:
            work[penalised] = self._penalise(work[penalised], penalised, rows, history)
        for row, (tokens, values) in biased:
            work[row].index_put_((tokens,), values, accumulate=True)
        if rows.bitmasks:
            masked = list(rows.bitmasks)
            words = np.stack([rows.bitmasks[row] for row in masked])
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder=sys.byteorder)
            allowed = torch.from_numpy(bits[:, : self._state.vocab_size]).to(work.device, torch.bool)
            work[masked] = work[masked].masked_fill_(~allowed, float("-inf"))
        for row in early:
            ends = [*self._state.end_token_ids, *params[row].stop_token_ids]
            work[row, ends] = float("-inf")
        return work

    def _penalise(
        self, logits: torch.Tensor, penalised: list[int], rows: SampleRows, history: torch.Tensor
    ) -> torch.Tensor:
        """Penalised copy of logits [P, vocab]. Touches only the tokens of the histories."""
        state, device = self._state, logits.device
        slots = torch.tensor([rows.slots[row] for row in penalised], device=device)
        lengths = torch.tensor([rows.lengths[row] for row in penalised], device=device)[:, None]
        prompts = torch.tensor([rows.prompt_lengths[row] for row in penalised], device=device)[:, None]
        longest = max(rows.lengths[row] for row in penalised)
        places = torch.arange(longest, device=device)
        tokens = history[slots, :longest].long()
        tokens = torch.where(places < lengths, tokens, tokens[:, :1])  # a token twice does no harm below
        values = logits.gather(1, tokens)

        repetition = state.repetition[slots][:, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values.clamp(max=torch.finfo(torch.float32).max)

        if len(self._counts) < len(penalised):
            self._counts = torch.zeros(len(penalised), state.vocab_size, device=device)
        counts = self._counts[: len(penalised)]
        generated = ((places >= prompts) & (places < lengths)).float()
        times = counts.scatter_add_(1, tokens, generated).gather(1, tokens)
        counts.scatter_(1, tokens, 0.0)
        values = values - state.frequency[slots][:, None] * times
        values = values - state.presence[slots][:, None] * (times > 0)
        return logits.scatter_(1, tokens, values)


def _is_penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
