"""Text that grows with its tokens, without broken characters."""

from __future__ import annotations

from decodestep.client.client import Client

_CONTEXT = 8  # tokens: enough for any character and any space before a word


class TextStream:
    """Turns the tokens of one sequence into text, piece by piece, with the server's tokenizer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._done: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        """Text of the tokens so far that was not returned before, as far as its characters are complete."""
        return self._decode(token_ids, partial=True)

    def finish(self) -> str:
        """What was held back."""
        return self._decode([], partial=False)

    def _decode(self, token_ids: list[int], partial: bool) -> str:
        self._held += token_ids
        if not self._held:
            return ""
        text, consumed = self._client.detokenize(self._held, context_token_ids=self._done, partial=partial)
        self._done = [*self._done, *self._held[:consumed]][-_CONTEXT:]
        del self._held[:consumed]
        return text
