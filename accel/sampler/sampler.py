"""Draws the next token of every row of a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from decodestep.accel.sampler.draw import CANDIDATES, draw
from decodestep.accel.sampler.params import MAX_LOGPROBS
from decodestep.accel.sampler.processors import Processors, SampleRows
from decodestep.accel.sampler.random import Purpose, uniforms
from decodestep.accel.sampler.state import SamplingState

__all__ = ["RowStatus", "SampleRows", "SampledRows", "Sampler", "prompt_logprobs"]

# Columns of what a step copies to the host; pairs of (token, logprob) follow.
_TOKEN, _STATUS, _LOGPROB, _TOP = 0, 1, 2, 3
_Top = list[tuple[int, float]]


class RowStatus(enum.IntEnum):
    """Whether a row has a token."""

    OK = 0
    NOT_FINITE = 1  # NaN or +inf in the logits, or nothing but -inf
    NOTHING_ALLOWED = 2  # masks leave no token
    SHORT = 3  # drawn anew by `sample`: top-p needs more candidates


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What was drawn, by row. Logprobs are None, and top_logprobs empty, where they were not asked for."""

    token_ids: list[int]
    status: list[RowStatus]
    logprobs: list[float | None]
    top_logprobs: list[_Top]

    def replace(self, rows: list[int], others: SampledRows) -> None:
        """Put those of `others`, in order, into these rows."""
        for at, row in enumerate(rows):
            self.token_ids[row], self.status[row] = others.token_ids[at], others.status[at]
            self.logprobs[row], self.top_logprobs[row] = others.logprobs[at], others.top_logprobs[at]


class Sampler:
    """Samples as sampling.proto says. What a row gets depends on the row alone, bit for bit."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._processors = Processors(state)

    def sample(self, logits: torch.Tensor, rows: SampleRows, history: torch.Tensor) -> SampledRows:
        """Draw for logits [R, vocab] float32, which stay as they are.

        One copy to the host; a second one if a flat distribution has a row's top-p sort the vocabulary.
        """
        sampled = self.unpack(self.launch(logits, rows, history), rows)
        short = [row for row, status in enumerate(sampled.status) if status is RowStatus.SHORT]
        if short:
            some = rows.take(short)
            packed = self.launch(logits[short], some, history, self._state.vocab_size)
            sampled.replace(short, self.unpack(packed, some))
        return sampled

    def launch(
        self, logits: torch.Tensor, rows: SampleRows, history: torch.Tensor, candidates: int = CANDIDATES
    ) -> torch.Tensor:
        """Issue all device work of a draw. Returns what `unpack` takes: float64 [R, columns]."""
        params = [self._state.params[slot] for slot in rows.slots]
        work = self._processors.apply(logits, rows, history)
        tokens = work.argmax(-1)
        peaks = work.gather(1, tokens[:, None])[:, 0]
        top = max((p.logprobs or 0 for p in params), default=0)
        packed = torch.zeros(len(params), _TOP + 2 * top, dtype=torch.float64, device=logits.device)
        status = (~torch.isfinite(peaks)).double() * RowStatus.NOT_FINITE
        if work is not logits:
            is_sound = torch.isfinite(logits.amax(-1))
            status = torch.where(peaks == -torch.inf, float(RowStatus.NOTHING_ALLOWED), status)
            status = torch.where(is_sound, status, float(RowStatus.NOT_FINITE))  # also where a mask hides it
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        kept: torch.Tensor | None = None
        if drawn:
            numbers = uniforms(
                [params[row].seed for row in drawn], [rows.lengths[row] for row in drawn], Purpose.SAMPLE
            )
            chosen, kept, is_short = draw(
                self._state,
                [rows.slots[row] for row in drawn],
                work if len(drawn) == len(params) else work[drawn],
                torch.from_numpy(numbers).to(logits.device),
                candidates,
            )
            tokens[drawn] = chosen
            status[drawn] = torch.where(
                is_short & (status[drawn] == 0), float(RowStatus.SHORT), status[drawn]
            )
        packed[:, _TOKEN] = tokens
        packed[:, _STATUS] = status
        told = [row for row, p in enumerate(params) if p.logprobs is not None]
        if told:
            spoken = logits[told]
            for place, row in enumerate(told):
                if params[row].processed_logprobs:
                    spoken[place] = (
                        work[row] if kept is None or row not in drawn else kept[drawn.index(row)].log()
                    )
            logprobs = spoken.log_softmax(-1)
            packed[told, _LOGPROB] = logprobs.gather(1, tokens[told][:, None])[:, 0].double()
            if top:
                packed[told, _TOP:] = _best(logprobs, top)
        return packed

    def unpack(self, packed: torch.Tensor, rows: SampleRows) -> SampledRows:
        """Copy the result of `launch` to the host, once, and read it."""
        table = packed.tolist()
        params = [self._state.params[slot] for slot in rows.slots]
        return SampledRows(
            token_ids=[int(line[_TOKEN]) for line in table],
            status=[RowStatus(int(line[_STATUS])) for line in table],
            logprobs=[
                None if p.logprobs is None else line[_LOGPROB] for p, line in zip(params, table, strict=True)
            ],
            top_logprobs=[_pairs(line, p.logprobs or 0) for p, line in zip(params, table, strict=True)],
        )


def prompt_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, top: int
) -> tuple[list[float], list[_Top]]:
    """Raw logprobs of token_ids [N] given logits [N, vocab], and of the `top` most probable ones."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None]).double()
    packed = torch.cat((own, own, own, _best(logprobs, top)), 1) if top else own
    table = packed.tolist()
    return [line[0] for line in table], [_pairs(line, top) for line in table]


def _best(logprobs: torch.Tensor, top: int) -> torch.Tensor:
    """The `top` best of each row as (token, logprob) one after another: float64 [R, 2 * top].

    The lower id comes first on ties. Always as many are selected, whatever is asked for, so that which ones
    does not depend on other rows.
    """
    count = min(MAX_LOGPROBS, logprobs.shape[1])
    tokens = logprobs.topk(count, -1).indices.sort(-1).values
    values, order = logprobs.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    pairs = torch.stack((tokens.gather(1, order).double(), values.double()), -1)
    missing = top - count
    if missing > 0:
        pairs = torch.nn.functional.pad(pairs, (0, 0, 0, missing))
    return pairs[:, :top].flatten(1)


def _pairs(line: list[float], top: int) -> _Top:
    fields = line[_TOP : _TOP + 2 * top]
    return [(int(token), value) for token, value in zip(fields[::2], fields[1::2], strict=True)]
