"""What goes to a server and what comes back, as plain values. Fields are explained in proto/decodestep/v1."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decodestep.client.errors import ServiceError


class LogprobsMode(enum.Enum):
    """Which distribution logprobs speak of."""

    RAW = "RAW"
    PROCESSED = "PROCESSED"


class Outcome(enum.Enum):
    """What happened to a row."""

    SAMPLED = "SAMPLED"
    APPENDED = "APPENDED"
    SKIPPED_FINISHED = "SKIPPED_FINISHED"
    FAILED = "FAILED"


class FinishReason(enum.Enum):
    """Why a sequence is finished."""

    END_TOKEN = "END_TOKEN"
    STOP = "STOP"
    LENGTH = "LENGTH"
    CONTEXT = "CONTEXT"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the sequence finishes. None: the default that sampling.proto names."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Appends tokens, or text, to a sequence and samples the token that follows, unless `more`."""

    sequence_id: int
    token_ids: Sequence[int] = ()
    text: str = ""
    start_position: int = 0
    more: bool = False
    sampling: SamplingParams | None = None
    num_output_tokens: int = 0
    allowed_token_bitmask: Sequence[int] = ()
    return_logits: bool = False


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Feeds one token, the one sampled last if `token_id` is None, and samples the next."""

    sequence_id: int
    token_id: int | None = None
    kv_length: int | None = None
    truncate_to: int | None = None
    allowed_token_bitmask: Sequence[int] = ()
    return_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration of a scheduler: cancellations at once, then releases, prefills, decodes in this order."""

    cancel: Sequence[int] = ()  # sequence ids
    releases: Sequence[int] = ()  # sequence ids
    prefills: Sequence[PrefillRow] = ()
    decodes: Sequence[DecodeRow] = ()
    queue_timeout: float | None = None  # seconds
    no_merge: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; `logprob` and `top_logprobs` where SamplingParams.logprobs asks for them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Logprobs at one position of a prompt."""

    position: int
    token_id: int
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a prefill or decode row. `error` with Outcome.FAILED."""

    sequence_id: int
    outcome: Outcome
    kv_length: int
    token: SampledToken | None
    finish_reason: FinishReason | None
    error: ServiceError | None
    seed: int | None
    prompt_logprobs: tuple[PromptLogprob, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """What became of a release."""

    sequence_id: int
    freed_blocks: int
    error: ServiceError | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one message went, in seconds."""

    queue: float
    prepare: float
    task_update: float
    device: float
    sample: float
    total: float


@dataclass(frozen=True, slots=True)
class Execution:
    """One device step that ran for a message. `graph_bucket` is None, and `eager_reason` set, if eager."""

    is_prefill: bool
    rows: int
    tokens: int
    graph_bucket: int | None
    eager_reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answer to a step, or to one part of it. `error` on a stream: nothing of the message ran."""

    instance_id: str
    step_id: int | None
    from_record: bool
    releases: tuple[ReleaseResult, ...]
    prefills: tuple[RowResult, ...]
    decodes: tuple[RowResult, ...]
    free_blocks: int
    timing: Timing
    executions: tuple[Execution, ...]
    error: ServiceError | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a generated text. The first one has the prompt's length and the seed."""

    tokens: tuple[SampledToken, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    seed: int | None
    prompt_logprobs: tuple[PromptLogprob, ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served."""

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_parameters: int
    weight_bytes: int
    dtype: str
    weight_formats: Mapping[str, int]
    end_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Where it runs."""

    type: str
    name: str
    num_threads: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KvCacheInfo:
    """The paged KV cache."""

    block_size: int
    num_blocks: int
    free_blocks: int
    bytes: int
    max_sequences: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of the server."""

    max_rows: int
    max_prefill_tokens: int
    max_in_flight: int
    max_queue: int
    max_tokens_per_step: int
    step_id_window: int
    session_idle_ms: int
    stream_grace_ms: int
    max_message_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_logprobs: int
    max_sessions: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is, holds and allows."""

    instance_id: str
    version: str
    model: ModelInfo
    device: DeviceInfo
    kv_cache: KvCacheInfo
    graph_buckets: tuple[int, ...]
    limits: Limits
    features: tuple[str, ...]
    uptime_s: float


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One living sequence."""

    sequence_id: int
    kv_length: int
    num_output_tokens: int
    pending_token_id: int | None
    num_blocks: int
    finish_reason: FinishReason | None
    chain_broken: bool


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The state of a session."""

    instance_id: str
    session: str
    sequences: tuple[SequenceInfo, ...]
    last_step_id: int | None
    has_stream: bool
    queued: int
