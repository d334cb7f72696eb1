"""TokenizerService."""

from __future__ import annotations

import asyncio

from google.protobuf import json_format

from decodestep.service.errors import Context, MessageError, abort
from decodestep.service.service import Service
from decodestep.service.templates import render
from decodestep.v1 import tokenizer_pb2
from decodestep.v1.tokenizer_pb2_grpc import TokenizerServiceServicer


class TokenizerServicer(TokenizerServiceServicer):
    """Runs the tokenizer in worker threads, so that a long text delays no step."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Text or chat messages to token ids."""
        try:
            _ = self._service.tokenizer
            if bool(request.text) == bool(request.messages):
                raise MessageError(
                    "INVALID_MESSAGE", "what to tokenize", [("text", "exactly one of text and messages")]
                )
            rendered = ""
            if request.messages:
                wants_prompt = not request.HasField("add_generation_prompt") or request.add_generation_prompt
                arguments = json_format.MessageToDict(request.template_arguments)
                rendered = await render(self._service, request.messages, wants_prompt, arguments)
            token_ids = await self._service.tokenize(
                rendered or request.text, request.add_special_tokens and not rendered
            )
        except MessageError as error:
            await abort(context, error)
            raise
        return tokenizer_pb2.TokenizeResponse(token_ids=token_ids, rendered=rendered)

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Token ids to text."""
        try:
            tokenizer = self._service.tokenizer
            self._check(request)
        except MessageError as error:
            await abort(context, error)
            raise
        token_ids, before = list(request.token_ids), list(request.context_token_ids)
        keep = request.keep_special_tokens
        if request.partial:
            text, consumed = await asyncio.to_thread(tokenizer.decode_partial, before, token_ids, keep)
        else:
            text = await asyncio.to_thread(tokenizer.decode, token_ids, keep, before)
            consumed = len(token_ids)
        return tokenizer_pb2.DetokenizeResponse(text=text, consumed=consumed)

    def _check(self, request: tokenizer_pb2.DetokenizeRequest) -> None:
        vocab_size = self._service.loaded.bounds.vocab_size
        for name in ("token_ids", "context_token_ids"):
            for index, token_id in enumerate(getattr(request, name)):
                if token_id >= vocab_size:
                    expected = f"below {vocab_size}, not {token_id}"
                    raise MessageError("INVALID_MESSAGE", "a token id", [(f"{name}[{index}]", expected)])
