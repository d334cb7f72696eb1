"""GetServerInfo and GetSession."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from functools import cache
from pathlib import Path

import grpc
import torch

from decodestep.accel.sampler.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from decodestep.service.responses import FINISH_REASONS
from decodestep.service.service import Service
from decodestep.service.sessions import SessionKey
from decodestep.v1 import info_pb2

FEATURES = ("step_id", "merge", "chunked_prefill", "prompt_logprobs", "allowed_token_bitmask", "cancel")


def server_info(service: Service) -> info_pb2.GetServerInfoResponse:
    """What the server is, holds and allows. Raises MessageError while it loads."""
    loaded, options = service.loaded, service.options
    engine, tokenizer = loaded.engine, loaded.tokenizer
    config, table = engine.config, engine.executor.table
    return info_pb2.GetServerInfoResponse(
        instance_id=service.instance_id,
        version=importlib.metadata.version("decodestep"),
        model=info_pb2.ModelInfo(
            name=options.model,
            architecture="Qwen3ForCausalLM",
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_parameters=engine.num_parameters,
            weight_bytes=engine.weight_bytes,
            dtype=str(engine.dtype).removeprefix("torch."),
            weight_formats=engine.weight_formats,
            end_token_ids=config.eos_token_ids,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        ),
        device=info_pb2.DeviceInfo(
            type=options.device,
            name=_processor(),
            num_threads=torch.get_num_threads(),
            versions={
                "torch": torch.__version__,
                "python": platform.python_version(),
                "grpcio": grpc.__version__,
            },
        ),
        kv_cache=info_pb2.KvCacheInfo(
            block_size=engine.cache.block_size,
            num_blocks=engine.cache.num_blocks,
            free_blocks=table.allocator.num_free,
            bytes=engine.cache.num_bytes,
            max_sequences=table.num_slots,
            num_sequences=table.num_sequences,
        ),
        limits=info_pb2.Limits(
            max_rows=options.max_rows,
            max_prefill_tokens=engine.executor.max_prefill_tokens,
            max_in_flight=options.max_in_flight,
            max_queue=options.max_queue,
            max_tokens_per_step=1,
            step_id_window=options.step_id_window,
            session_idle_ms=round(1000 * options.session_idle),
            stream_grace_ms=round(1000 * options.stream_grace),
            max_message_bytes=options.max_message_size,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            max_logit_bias=MAX_LOGIT_BIAS,
            max_logprobs=MAX_LOGPROBS,
            max_sessions=options.max_sessions,
        ),
        features=FEATURES,
        uptime_s=time.monotonic() - service.started,
    )


def session_info(service: Service, key: SessionKey) -> info_pb2.GetSessionResponse:
    """The sequences of a session, each as its last row left it."""
    response = info_pb2.GetSessionResponse(instance_id=service.instance_id, session=key[1])
    session = service.sessions.get(key)
    if session is None:
        return response
    response.has_stream = session.has_stream
    response.queued = len(service.loaded.queue.entries(session.sequences))
    if session.record.last_step_id is not None:
        response.last_step_id = session.record.last_step_id
    for sequence_id, view in sorted(session.sequences.views.copy().items()):
        response.sequences.add(
            sequence_id=sequence_id,
            kv_length=view.kv_length,
            num_output_tokens=view.num_output_tokens,
            pending_token_id=view.pending,
            num_blocks=view.num_blocks,
            finish_reason=None if view.finish is None else FINISH_REASONS[view.finish],
            chain_broken=view.is_broken,
        )
    return response


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
