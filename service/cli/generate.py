"""Continues prompts over the Generate RPC of a running service, or of one inside this process."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field

import grpc

from decodestep.accel.errors import AccelError
from decodestep.service.cli.channel import open_channel
from decodestep.service.cli.failures import explain_failure, explain_rpc
from decodestep.service.cli.options import SamplingOptions, TargetOptions
from decodestep.service.options import ModelOptions, ServeOptions
from decodestep.v1 import generate_pb2, sampling_pb2, step_pb2, tokenizer_pb2
from decodestep.v1.service_pb2_grpc import DecodeStepServiceStub

_MAX_CONCURRENT = 64  # a service has limits for sessions and queue; more at once would not be faster


@dataclass(slots=True)
class Continuation:
    """What became of one prompt."""

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # END_TOKEN, STOP, LENGTH or CONTEXT
    num_prompt_tokens: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that `decodestep generate` was asked for."""

    prompts: Sequence[str]
    is_chat: bool
    sampling: SamplingOptions
    model: ModelOptions
    target: TargetOptions
    as_json: bool


def generate(job: Job) -> int:
    """Continue all prompts at once, print them in order. Returns the exit code."""
    try:
        asyncio.run(_generate(job))
    except grpc.aio.AioRpcError as error:
        print(explain_rpc(error, job.target.target or "the service in this process"), file=sys.stderr)
        return 1
    except AccelError as error:
        print(explain_failure(error), file=sys.stderr)
        return 1
    return 0


async def _generate(job: Job) -> None:
    async with AsyncExitStack() as stack:
        target = job.target
        if target.target is None:
            address = await stack.enter_async_context(_own_service(job.model))
            target = TargetOptions(target=address)
        channel = await stack.enter_async_context(open_channel(target))
        running = asyncio.Semaphore(_MAX_CONCURRENT)
        is_streamed = len(job.prompts) == 1 and not job.as_json

        async def run(prompt: str) -> Continuation:
            async with running:
                return await _continue(channel, prompt, job, is_streamed)

        tasks = [asyncio.create_task(run(prompt)) for prompt in job.prompts]
        try:
            for task in tasks:
                _show(await task, job, is_streamed)
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def _own_service(model: ModelOptions) -> AsyncIterator[str]:
    """A service inside this process; gives its address."""
    from decodestep.service.server import Server  # noqa: PLC0415  (loads torch)

    with tempfile.TemporaryDirectory(prefix="decodestep-") as folder:
        address = f"unix:{folder}/socket"
        server = Server(
            ServeOptions(**asdict(model), listen=(address,)), lambda line: print(line, file=sys.stderr)
        )
        await server.start()
        try:
            await server.wait_loaded()
            yield address
        finally:
            await server.stop()


async def _continue(channel: grpc.aio.Channel, prompt: str, job: Job, is_streamed: bool) -> Continuation:
    request = generate_pb2.GenerateRequest(sampling=_sampling(job.sampling))
    if job.is_chat:
        request.messages.append(tokenizer_pb2.ChatMessage(role="user", content=prompt))
    else:
        request.text = prompt
    result = Continuation(prompt)
    async for piece in DecodeStepServiceStub(channel).Generate(request):
        result.text += piece.text
        result.token_ids += [token.token_id for token in piece.tokens]
        result.num_prompt_tokens += piece.num_prompt_tokens
        if piece.HasField("seed"):
            result.seed = piece.seed
        if piece.finish_reason:
            name = step_pb2.FinishReason.Name(piece.finish_reason)
            result.finish_reason = name.removeprefix("FINISH_REASON_")
        if is_streamed:
            print(piece.text, end="", flush=True)
    return result


def _show(result: Continuation, job: Job, was_streamed: bool) -> None:
    if job.as_json:
        print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
    elif was_streamed:
        print()
    else:
        print(f"> {result.prompt}\n{result.text}\n", flush=True)


def _sampling(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop_token_ids=options.stop_token_id,
        ignore_eos=options.ignore_eos,
    )
