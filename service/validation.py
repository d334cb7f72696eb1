"""Requests to messages: everything that can be refused without looking at any state."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decodestep.accel.errors import RowError
from decodestep.accel.sampler.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams
from decodestep.service.errors import InvalidRow, MessageError
from decodestep.service.messages import Decode, Message, Prefill, Release
from decodestep.v1 import sampling_pb2, step_pb2

Violations = list[tuple[str, str]]
_NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What requests are checked against."""

    vocab_size: int
    context_length: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Names:
    """What the parts of a StepRequest are called in the request as it was sent."""

    releases: str = "releases[{}].sequence_id"
    prefills: str = "prefills"
    decodes: str = "decodes"


STEP_NAMES = Names()


def check_message(request: step_pb2.StepRequest, bounds: Bounds, names: Names = STEP_NAMES) -> None:
    """Refuse what a message says of itself. Raises MessageError."""
    violations: Violations = []
    for name, rows in ((names.prefills, request.prefills), (names.decodes, request.decodes)):
        if len(rows) > bounds.max_rows:
            violations.append((name, f"at most {bounds.max_rows} rows, {len(rows)} given"))
    releases_all = any(row.all for row in request.releases)
    if releases_all and len(request.releases) > 1:
        violations.append(("releases", "a row with `all` stands alone"))
    released: set[int] = set()
    if not releases_all:
        _check_ids(names.releases, request.releases, released, violations)
    stepped: set[int] = set()
    _check_ids(names.prefills + "[{}].sequence_id", request.prefills, stepped, violations)
    _check_ids(names.decodes + "[{}].sequence_id", request.decodes, stepped, violations)
    if violations:
        raise MessageError("INVALID_MESSAGE", "the message contradicts itself or a limit", violations)
    for name in ("forks", "block_frees", "block_copies"):
        if len(getattr(request, name)):
            raise MessageError("NOT_SERVED_YET", f"`{name}` is not served", [(name, "empty")])


class _HasSequenceId(Protocol):
    @property
    def sequence_id(self) -> int: ...


def _check_ids(path: str, rows: Iterable[_HasSequenceId], seen: set[int], violations: Violations) -> None:
    for index, row in enumerate(rows):
        if row.sequence_id in seen:
            violations.append((path.format(index), f"{row.sequence_id} stands in the message more than once"))
        seen.add(row.sequence_id)


def parse_message(
    request: step_pb2.StepRequest,
    texts: dict[int, list[int]],
    bounds: Bounds,
    names: Names = STEP_NAMES,
) -> Message:
    """Turn a checked request into a Message.

    `texts` holds the tokens of prefill rows given as text, by index. A row whose own values are wrong becomes
    a row that fails.
    """
    return Message(
        releases=[Release(row.sequence_id, row.all) for row in request.releases],
        prefills=[
            parse_prefill(row, f"{names.prefills}[{index}]", texts.get(index), bounds)
            for index, row in enumerate(request.prefills)
        ],
        decodes=[
            parse_decode(row, f"{names.decodes}[{index}]", bounds)
            for index, row in enumerate(request.decodes)
        ],
        no_merge=request.no_merge,
        queue_timeout=request.queue_timeout_ms / 1000 if request.queue_timeout_ms else None,
    )


def parse_prefill(
    row: step_pb2.PrefillRow, path: str, text_token_ids: list[int] | None, bounds: Bounds
) -> Prefill:
    """Turn one prefill row into a Prefill, with `error` set if it is refused."""
    violations: Violations = []
    if bool(row.token_ids) == bool(row.text):
        violations.append((f"{path}.token_ids", "exactly one of token_ids and text, not empty"))
    source = row.token_ids if text_token_ids is None else text_token_ids
    token_ids = np.fromiter(source, dtype=np.int64, count=len(source))
    beyond = np.flatnonzero(token_ids >= bounds.vocab_size)
    if len(beyond):
        first = int(beyond[0])
        violations.append((f"{path}.token_ids[{first}]", _below_vocab(int(token_ids[first]), bounds)))
    if row.num_output_tokens > len(token_ids):
        violations.append((f"{path}.num_output_tokens", f"at most the row's {len(token_ids)} tokens"))
    if row.more and row.allowed_token_bitmask:
        violations.append((f"{path}.allowed_token_bitmask", "empty with `more`: the row samples nothing"))
    params = None
    if row.HasField("sampling"):
        params = parse_sampling(row.sampling, f"{path}.sampling", bounds, violations)
    bitmask = _parse_bitmask(row.allowed_token_bitmask, path, bounds, violations)
    error = _unserved(row, path, ("block_ids", "first_block_index", "cached_tokens"))
    return Prefill(
        sequence_id=row.sequence_id,
        token_ids=token_ids.astype(np.int32) if not violations else _NO_TOKENS,
        start_position=row.start_position,
        more=row.more,
        params=params,
        num_output_tokens=row.num_output_tokens,
        bitmask=bitmask,
        return_logits=row.return_logits,
        error=_refusal(violations) or error,
    )


def parse_decode(row: step_pb2.DecodeRow, path: str, bounds: Bounds) -> Decode:
    """Turn one decode row into a Decode, with `error` set if it is refused."""
    violations: Violations = []
    token_id = row.token_id if row.HasField("token_id") else None
    if token_id is not None and token_id >= bounds.vocab_size:
        violations.append((f"{path}.token_id", _below_vocab(token_id, bounds)))
    error = _unserved(row, path, ("draft_token_ids", "block_ids", "first_block_index"))
    if row.num_tokens > 1:
        error = RowError(
            "NOT_SERVED_YET", f"`{path}.num_tokens` {row.num_tokens}: one token a step is served"
        )
    return Decode(
        sequence_id=row.sequence_id,
        token_id=token_id,
        kv_length=row.kv_length if row.HasField("kv_length") else None,
        truncate_to=row.truncate_to if row.HasField("truncate_to") else None,
        bitmask=_parse_bitmask(row.allowed_token_bitmask, path, bounds, violations),
        return_logits=row.return_logits,
        error=_refusal(violations) or error,
    )


def parse_sampling(
    message: sampling_pb2.SamplingParams, path: str, bounds: Bounds, violations: Violations
) -> SamplingParams:
    """Turn sampling parameters into the device side's; what is wrong is added to `violations`."""

    def ranged(name: str, low: float, high: float, *, above_low: bool = False) -> float:
        value = float(getattr(message, name))
        if not (low < value <= high if above_low else low <= value <= high):  # also refuses NaN
            bracket = "(" if above_low else "["
            violations.append((f"{path}.{name}", f"in {bracket}{low:g}, {high:g}], not {value:g}"))
        return value

    def count(name: str, limit: int) -> int | None:
        if not message.HasField(name):  # type: ignore[arg-type]  # the stubs want literals
            return None
        value = int(getattr(message, name))
        if value > limit:
            violations.append((f"{path}.{name}", f"at most {limit}, not {value}"))
        return value

    bias = [(entry.token_id, entry.bias) for entry in message.logit_bias]
    if len(bias) > MAX_LOGIT_BIAS:
        violations.append((f"{path}.logit_bias", f"at most {MAX_LOGIT_BIAS} entries, not {len(bias)}"))
    if len({token for token, _ in bias}) < len(bias):
        violations.append((f"{path}.logit_bias", "each token id once"))
    for index, (token, value) in enumerate(bias):
        if token >= bounds.vocab_size:
            violations.append((f"{path}.logit_bias[{index}].token_id", _below_vocab(token, bounds)))
        if not -1000 <= value <= 1000:
            violations.append((f"{path}.logit_bias[{index}].bias", f"in [-1000, 1000], not {value:g}"))
    stops = tuple(message.stop_token_ids)
    if len(stops) > MAX_STOP_TOKEN_IDS:
        violations.append((f"{path}.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, not {len(stops)}"))
    for index, token in enumerate(stops):
        if token >= bounds.vocab_size:
            violations.append((f"{path}.stop_token_ids[{index}]", _below_vocab(token, bounds)))
    if message.logprobs_mode not in sampling_pb2.LogprobsMode.values():
        violations.append((f"{path}.logprobs_mode", "a LogprobsMode"))
    max_tokens = int(message.max_tokens) if message.HasField("max_tokens") else None
    if max_tokens == 0:
        violations.append((f"{path}.max_tokens", "at least 1"))
    return SamplingParams(
        temperature=ranged("temperature", 0, 100),
        top_k=message.top_k,
        top_p=ranged("top_p", 0, 1, above_low=True) if message.HasField("top_p") else 1.0,
        min_p=ranged("min_p", 0, 1),
        repetition_penalty=(
            ranged("repetition_penalty", 0, 100, above_low=True)
            if message.HasField("repetition_penalty")
            else 1.0
        ),
        presence_penalty=ranged("presence_penalty", -100, 100),
        frequency_penalty=ranged("frequency_penalty", -100, 100),
        logit_bias=tuple(bias),
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        stop_token_ids=stops,
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        max_tokens=max_tokens,
        logprobs=count("logprobs", MAX_LOGPROBS),
        processed_logprobs=message.logprobs_mode == sampling_pb2.LOGPROBS_MODE_PROCESSED,
        prompt_logprobs=count("prompt_logprobs", MAX_LOGPROBS),
    )


def _parse_bitmask(
    words: Iterable[int], path: str, bounds: Bounds, violations: Violations
) -> np.ndarray[tuple[int], np.dtype[np.uint32]] | None:
    mask = np.fromiter(words, dtype=np.uint32)
    if not len(mask):
        return None
    expected = math.ceil(bounds.vocab_size / 32)
    if len(mask) != expected:
        violations.append((f"{path}.allowed_token_bitmask", f"{expected} words, not {len(mask)}"))
    return mask


def _below_vocab(token_id: int, bounds: Bounds) -> str:
    return f"below the vocabulary size {bounds.vocab_size}, not {token_id}"


def _refusal(violations: Violations) -> RowError | None:
    if not violations:
        return None
    listed = "; ".join(f"{name}: {expected}" for name, expected in violations)
    return InvalidRow("INVALID_ROW", listed, violations=violations)


def _unserved(
    row: step_pb2.PrefillRow | step_pb2.DecodeRow, path: str, names: tuple[str, ...]
) -> RowError | None:
    for name in names:
        if getattr(row, name):
            return RowError("NOT_SERVED_YET", f"`{path}.{name}` is not served")
    return None
