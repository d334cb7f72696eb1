"""The small loop behind Generate: one prompt, two steps in flight, through the same queue as everyone."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator

import numpy as np

from decodestep.service import responses
from decodestep.service.errors import InvalidRow, MessageError
from decodestep.service.messages import Decode, Message, Outcome, Prefill, Report, RowReport
from decodestep.service.rows import default_params
from decodestep.service.service import Service, Submitted
from decodestep.service.templates import render
from decodestep.service.tokenizer import TextStream
from decodestep.service.validation import Violations, parse_sampling
from decodestep.v1 import generate_pb2

_DEFAULT_MAX_TOKENS = 64
_IN_FLIGHT = 2  # one step is prepared while another runs
_SEQUENCE = 0


class Generation:
    """One prompt on its way."""

    def __init__(self, service: Service, prefill: Prefill) -> None:
        self._service = service
        self._prefill = prefill
        self._session = service.sessions.open_private()
        self._in_flight: deque[Submitted] = deque()
        tokenizer = service.loaded.tokenizer
        self._text = None if tokenizer is None else TextStream(tokenizer)

    @classmethod
    async def start(cls, service: Service, request: generate_pb2.GenerateRequest) -> Generation:
        """Check the request and tokenize its prompt. Raises MessageError."""
        bounds = service.loaded.bounds
        violations: Violations = []
        given = [name for name in ("text", "token_ids", "messages") if getattr(request, name)]
        if len(given) != 1:
            violations.append(("text", "exactly one of text, token_ids and messages, not empty"))
        params = default_params()
        if request.HasField("sampling"):
            params = parse_sampling(request.sampling, "sampling", bounds, violations)
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=_DEFAULT_MAX_TOKENS)
        for index, token_id in enumerate(request.token_ids):
            if token_id >= bounds.vocab_size:
                violations.append((f"token_ids[{index}]", f"below {bounds.vocab_size}, not {token_id}"))
                break
        if violations:
            raise MessageError("INVALID_MESSAGE", "the request cannot be run", violations)
        token_ids = list(request.token_ids)
        if request.text:
            token_ids = await service.tokenize(request.text)
        elif request.messages:
            token_ids = await service.tokenize(await render(service, request.messages))
        if not token_ids:
            raise MessageError("INVALID_MESSAGE", "the prompt has no tokens", [(given[0], "a token or more")])
        return cls(service, Prefill(_SEQUENCE, np.array(token_ids, dtype=np.int32), params=params))

    async def run(self) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Pieces, one for each token. Raises MessageError."""
        self._submit(Message(prefills=[self._prefill]), must_fit=True)
        self._submit(_STEP)
        is_first = True
        while True:
            submitted = self._in_flight[0]
            report = await submitted.wait()
            self._in_flight.popleft()
            row = (report.prefills or report.decodes)[0]
            if row.error is not None:
                self._raise(row)
            self._refill(row)
            yield self._piece(row, report, submitted, is_first)
            is_first = False
            if row.finish is not None:
                return

    def close(self) -> None:
        """Drop what is under way and give back what it holds."""
        self._service.drop(self._session, self._in_flight)
        self._service.sessions.close_private(self._session)

    def _submit(self, message: Message, must_fit: bool = False) -> None:
        self._in_flight.append(
            self._service.submit(self._session, message, must_fit, arrived=time.perf_counter())
        )

    def _refill(self, row: RowReport) -> None:
        if row.finish is None:
            while len(self._in_flight) < _IN_FLIGHT:
                self._submit(_STEP)

    def _piece(
        self, row: RowReport, report: Report, submitted: Submitted, is_first: bool
    ) -> generate_pb2.GenerateResponse:
        piece = generate_pb2.GenerateResponse(
            instance_id=self._service.instance_id,
            timing=responses.timing(report, time.perf_counter() - submitted.arrived),
        )
        if row.sampled is not None:
            piece.tokens.append(responses.sampled_token(row.sampled))
            if self._text is not None:
                piece.text = self._text.push(row.sampled.token_id)
        if row.finish is not None:
            piece.finish_reason = responses.FINISH_REASONS[row.finish]
            if self._text is not None:
                piece.text += self._text.finish()
        if is_first:
            piece.num_prompt_tokens = len(self._prefill.token_ids)
            piece.prompt_logprobs.extend(responses.prompt_logprobs(row))
        if row.seed is not None:
            piece.seed = row.seed
        return piece

    def _raise(self, row: RowReport) -> None:
        error = row.error
        if error is None or row.outcome is not Outcome.FAILED:
            return
        if error.reason == "CANCELLED":  # nobody else can cancel it: the server ends
            raise MessageError("SHUTTING_DOWN", "the server is shutting down")
        violations = error.violations if isinstance(error, InvalidRow) else []
        raise MessageError(error.reason, error.message, violations, error.metadata)


_STEP = Message(decodes=[Decode(_SEQUENCE)])
