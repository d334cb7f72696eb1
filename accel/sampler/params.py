"""What a caller may ask of sampling. Values, order and ties as in decodestep/v1/sampling.proto."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of a sequence is chosen and when the sequence finishes.

    Ranges are checked where requests are read; here every value is within them.
    """

    temperature: float = 0.0  # 0: greedy; else [0, 100]
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # (0, 100]
    presence_penalty: float = 0.0  # [-100, 100]
    frequency_penalty: float = 0.0  # [-100, 100]
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), an id once
    seed: int = 0  # uint64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # go on after the model's own end tokens
    min_tokens: int = 0  # generated before an end or stop token can be sampled
    max_tokens: int | None = None  # None: up to the context's end
    logprobs: int | None = None  # None: none; n: of the sampled token and of the n most probable
    processed_logprobs: bool = False  # of the distribution drawn from instead of the model's own
    prompt_logprobs: int | None = None  # as logprobs, of the prompt's tokens, always the model's own
