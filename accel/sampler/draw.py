"""Temperature, top-k, top-p, min-p and one draw."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from decodestep.accel.sampler.state import SamplingState

_CANDIDATES = 256  # of the most probable tokens; top-p mostly needs no more
_BLOCK = 256  # tokens whose probabilities are summed first when one is looked for


def draw(
    state: SamplingState, slots: list[int], logits: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row of processed logits [S, vocab], with numbers [S] float64 in [0, 1).

    Returns tokens [S] and the probabilities that they were drawn from [S, vocab], not normalised. One number
    a row, by inversion of the cumulated probabilities in the order of token ids.
    """
    params = [state.params[slot] for slot in slots]
    index = torch.tensor(slots, device=logits.device)
    peaks = logits.amax(-1, keepdim=True)
    probs = ((logits - peaks) / state.temperature[index][:, None]).softmax(-1)
    vocab = logits.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    is_cut = [k > 0 or p.top_p < 1 for k, p in zip(top_k, params, strict=True)]
    if any(is_cut):
        cut = [row for row, is_row_cut in enumerate(is_cut) if is_row_cut]
        least = _least_kept(
            logits[cut], probs[cut], [top_k[row] for row in cut], state.top_p[index[cut]].double()
        )
        probs[cut] = probs[cut].masked_fill_(logits[cut] < least, 0.0)
    if any(p.min_p > 0 for p in params):
        floor = state.min_p[index][:, None] * probs.amax(-1, keepdim=True)
        probs.masked_fill_(probs < floor, 0.0)
    return _invert(probs, numbers), probs


def _least_kept(
    logits: torch.Tensor, probs: torch.Tensor, top_k: list[int], top_p: torch.Tensor
) -> torch.Tensor:
    """The smallest logit [S, 1] that top-k and then top-p keep; equal ones are kept with it."""
    vocab = logits.shape[1]
    count = min(vocab, max(_CANDIDATES, *top_k))
    best, tokens = logits.topk(count, -1)
    least = torch.full_like(best[:, :1], -torch.inf)
    limited = [row for row, k in enumerate(top_k) if k]
    if limited:
        last = torch.tensor([top_k[row] - 1 for row in limited], device=logits.device)
        least[limited] = best[limited].gather(1, last[:, None])
    narrowed = (top_p < 1).nonzero()[:, 0].tolist()
    if narrowed:
        goal = (
            top_p[narrowed]
            * _block_sums(probs[narrowed].masked_fill_(logits[narrowed] < least[narrowed], 0.0)).cumsum(-1)[
                :, -1
            ]
        )
        while narrowed:
            mass = probs[narrowed].gather(1, tokens[narrowed]).double().cumsum(-1)
            is_reached = mass[:, -1] >= goal
            place = (mass < goal[:, None]).sum(-1).clamp(max=count - 1)
            if count == vocab:  # rounding may leave the sum of all below a goal of nearly all
                is_reached[:] = True
            found = best[narrowed].gather(1, place[:, None])
            open_rows = []
            for at, row in enumerate(narrowed):
                if is_reached[at]:
                    least[row] = torch.maximum(least[row], found[at])
                else:
                    open_rows.append(at)
            narrowed = [narrowed[at] for at in open_rows]
            if narrowed:
                goal = goal[open_rows]
                count = vocab
                best, tokens = logits.sort(-1, descending=True)
    return least


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
