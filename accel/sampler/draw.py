"""Temperature, top-k, top-p, min-p and one draw."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from decodestep.accel.sampler.state import SamplingState

CANDIDATES = 256  # of the most probable tokens; top-p mostly needs no more
_BLOCK = 256  # tokens whose probabilities are summed first when one is looked for


def draw(
    state: SamplingState,
    slots: list[int],
    logits: torch.Tensor,
    numbers: torch.Tensor,
    candidates: int = CANDIDATES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token for each row of processed logits [S, vocab], with numbers [S] float64 in [0, 1).

    Returns tokens [S], the probabilities that they were drawn from [S, vocab], not normalised, and whether a
    row's top-p needs more than so many candidates [S] bool: its token is not to be used then. One number a
    row, by inversion of the cumulated probabilities in the order of token ids.
    """
    params = [state.params[slot] for slot in slots]
    index = torch.tensor(slots, device=logits.device)
    peaks = logits.amax(-1, keepdim=True)
    probs = ((logits - peaks) / state.temperature[index][:, None]).softmax(-1)
    vocab = logits.shape[1]
    is_short = torch.zeros(len(slots), dtype=torch.bool, device=logits.device)
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    cut = [row for row, p in enumerate(params) if top_k[row] or p.top_p < 1]
    if cut:
        narrowed = [at for at, row in enumerate(cut) if params[row].top_p < 1]
        least, is_short[cut] = _least_kept(
            logits[cut],
            probs[cut],
            [top_k[row] for row in cut],
            narrowed,
            state.top_p[index[cut]].double(),
            candidates,
        )
        probs[cut] = probs[cut].masked_fill_(logits[cut] < least, 0.0)
    if any(p.min_p > 0 for p in params):
        floor = state.min_p[index][:, None] * probs.amax(-1, keepdim=True)
        probs.masked_fill_(probs < floor, 0.0)
    return _invert(probs, numbers), probs, is_short


def _least_kept(
    logits: torch.Tensor,
    probs: torch.Tensor,
    top_k: list[int],
    narrowed: list[int],
    top_p: torch.Tensor,
    candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit [S, 1] that top-k and then top-p, in rows `narrowed`, keep; equal ones stay with it.

    And whether the row's top-p reaches beyond the candidates [S] bool.
    """
    vocab = logits.shape[1]
    count = min(vocab, max(candidates, *top_k))
    best, tokens = logits.sort(-1, descending=True) if count == vocab else logits.topk(count, -1)
    least = torch.full_like(best[:, :1], -torch.inf)
    is_short = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    limited = [row for row, k in enumerate(top_k) if k]
    if limited:
        last = torch.tensor([top_k[row] - 1 for row in limited], device=logits.device)
        least[limited] = best[limited].gather(1, last[:, None])
    if narrowed:
        kept = probs[narrowed].masked_fill_(logits[narrowed] < least[narrowed], 0.0)
        goal = top_p[narrowed] * _block_sums(kept).cumsum(-1)[:, -1]
        mass = probs[narrowed].gather(1, tokens[narrowed]).double().cumsum(-1)
        place = (mass < goal[:, None]).sum(-1).clamp(max=count - 1)
        least[narrowed] = torch.maximum(least[narrowed], best[narrowed].gather(1, place[:, None]))
        if count < vocab:  # rounding may leave the sum of all below a goal of nearly all
            is_short[narrowed] = mass[:, -1] < goal
    return least, is_short


def _block_sums(probs: torch.Tensor) -> torch.Tensor:
    """Sums of _BLOCK probabilities each: [S, vocab] to float64 [S, blocks].

    Each is one short reduction of its own, so it does not depend on how many rows there are.
    """
    padded = F.pad(probs, (0, -probs.shape[1] % _BLOCK))
    return padded.view(len(probs), -1, _BLOCK).sum(-1, dtype=torch.float64)


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first tokens [S] up to which the cumulated probabilities exceed numbers * their sum."""
    cumulated = _block_sums(probs).cumsum(-1)
    goal = (numbers * cumulated[:, -1])[:, None]
    block = (cumulated <= goal).sum(-1, keepdim=True).clamp(max=cumulated.shape[1] - 1)
    before = F.pad(cumulated, (1, 0)).gather(1, block)
    tokens = (block * _BLOCK + torch.arange(_BLOCK, device=probs.device)).clamp(max=probs.shape[1] - 1)
    inside = probs.gather(1, tokens).double()
    # The clamped places repeat the last token; they must not count again.
    inside[:, 1:].masked_fill_(tokens[:, 1:] == tokens[:, :-1], 0.0)
    passed = (inside.cumsum(-1) <= goal - before).sum(-1)
    # The two sums may differ in the last bit: stay at the last token that has any probability.
    last = (inside > 0).double().mul(torch.arange(1, _BLOCK + 1, device=probs.device)).argmax(-1)
    return tokens.gather(1, torch.minimum(passed, last)[:, None])[:, 0]
