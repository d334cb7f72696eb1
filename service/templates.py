"""Chat messages to text, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from decodestep.service.errors import MessageError
from decodestep.service.service import Service
from decodestep.service.tokenizer import TemplateError
from decodestep.v1 import tokenizer_pb2


async def render(
    service: Service,
    messages: Iterable[tokenizer_pb2.ChatMessage],
    add_generation_prompt: bool = True,
    arguments: Mapping[str, object] | None = None,
) -> str:
    """Text of a conversation in the model's template. Raises MessageError."""
    tokenizer = service.tokenizer
    if not tokenizer.has_chat_template:
        raise MessageError("NO_CHAT_TEMPLATE", f"the tokenizer of {service.options.model} has none")
    plain = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return await asyncio.to_thread(tokenizer.render, plain, add_generation_prompt, arguments)
    except TemplateError as error:
        raise MessageError("TEMPLATE_FAILED", str(error)) from error
