"""Text to tokens and back, with the tokenizer of the model folder, also piece by piece."""

from __future__ import annotations

import codecs
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decodestep.accel.errors import ModelError

REPLACEMENT = "\ufffd"  # stands for bytes that are no character
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # one of them makes a folder have a tokenizer
# A character of UTF-8 has at most four bytes. When more tokens than this have text and still end amid a
# character, no more is held back.
_MOST_HELD = 4
# Tokens of context that decide how the next one reads.
_CONTEXT = 8

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
# Byte-level BPE writes each byte of a token as one character: printable ones as themselves, the others as
# characters from U+0100 on, in order (GPT-2's table).
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class TemplateError(Exception):
    """The chat template cannot render these messages, or is given arguments that are none of its own."""


class Tokenizer:
    """The model's own tokenizer. Holds no state between calls: threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = _ByteTokens.of(tokenizer)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) - {"tools", "documents"}
        # The first call sets the backend's truncation and padding; later ones only read, from any thread.
        self.encode("a", add_special_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """Read the folder's tokenizer; None if it has none. Raises ModelError for one that cannot be read."""
        if not any((folder / name).exists() for name in _FILES):
            return None
        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except Exception as error:  # the tokenizers library raises Exception itself for a damaged file
            raise ModelError(str(folder), [f"the tokenizer cannot be read: {error}"]) from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens that it spells out become those tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return self._tokenizer.chat_template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation in the chat template; its ids are `encode(text)`.

        `messages` have `role` and `content`; `template_arguments` are further variables of the template.
        Raises TemplateError.
        """
        arguments = dict(template_arguments or {})
        if reserved := self._reserved & arguments.keys():
            raise TemplateError(f"not variables of a template: {', '.join(sorted(reserved))}")
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        # A template is a program: besides Jinja's own errors it raises what its expressions raise.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateError(str(error)) from error
        return str(rendered)

    def decode(
        self,
        token_ids: Sequence[int],
        keep_special_tokens: bool = False,
        context_token_ids: Sequence[int] = (),
    ) -> str:
        """Text of all the tokens; bytes that are no character read as U+FFFD, unknown ids as nothing.

        With context, what those tokens add to a text that decode_partial gave for the context.
        """
        if not context_token_ids:
            return self._decode(token_ids, keep_special_tokens)
        context = context_token_ids[-_CONTEXT:]
        if self._byte_tokens is not None:
            decoder = _Utf8(self._byte_tokens.read(context, keep_special_tokens))
            return decoder.feed(b"".join(self._byte_tokens.read(token_ids, keep_special_tokens)), final=True)
        context = self._readable(context, keep_special_tokens)
        before = len(self._decode(context, keep_special_tokens))
        return self._decode([*context, *token_ids], keep_special_tokens)[before:]

    def decode_partial(
        self,
        context_token_ids: Sequence[int],
        token_ids: Sequence[int],
        keep_special_tokens: bool = False,
    ) -> tuple[str, int]:
        """Text that `token_ids` add after the context, and how many of them are in it.

        The tokens beyond, whose last character is not complete, are to be sent again with those that follow.
        At most a few that have text are held back. The last 8 tokens before are context enough. For
        byte-level BPE the pieces put together, closed by decode(held, context), are exactly decode(all).
        """
        context = context_token_ids[-_CONTEXT:]
        if self._byte_tokens is not None:
            return _decode_partial_bytes(
                self._byte_tokens.read(context, keep_special_tokens),
                self._byte_tokens.read(token_ids, keep_special_tokens),
            )
        # Other tokenizers: go by what decoding says, without looking into tokens.
        context = self._readable(context, keep_special_tokens)
        before = len(self._decode(context, keep_special_tokens))
        for count in range(len(token_ids), max(0, len(token_ids) - _MOST_HELD - 1), -1):
            text = self._decode([*context, *token_ids[:count]], keep_special_tokens)
            if not text.endswith(REPLACEMENT):
                return text[before:], count
        if len(token_ids) <= _MOST_HELD:
            return "", 0
        return self._decode([*context, *token_ids], keep_special_tokens)[before:], len(token_ids)

    def _readable(self, context: Sequence[int], keep_special_tokens: bool) -> Sequence[int]:
        """The context without leading tokens that are the rest of a cut character."""
        start = 0
        while REPLACEMENT in self._decode(context[start:], keep_special_tokens):
            start += 1
        return context[start:]

    def _decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=not keep_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)


class TextStream:
    """Text of tokens that come one by one, never with a broken character between pieces."""

    def __init__(self, tokenizer: Tokenizer, keep_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; often empty amid a character."""
        self._held.append(token_id)
        text, consumed = self._tokenizer.decode_partial(self._context, self._held, self._keep_special_tokens)
        if consumed:
            self._context = (self._context + self._held[:consumed])[-_CONTEXT:]
            del self._held[:consumed]
        return text

    def finish(self) -> str:
        """What was held back; a character that never became complete reads as U+FFFD."""
        text = self._tokenizer.decode(self._held, self._keep_special_tokens, self._context)
        self._held = []
        return text


class _ByteTokens:
    """Tokens of a byte-level BPE as bytes, just as the library's ByteLevel decoder reads them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> _ByteTokens | None:
        """None for a tokenizer of another kind."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return cls(backend) if backend is not None and isinstance(backend.decoder, ByteLevel) else None

    def read(self, token_ids: Iterable[int], keep_special_tokens: bool) -> Iterator[bytes]:
        """Bytes of each token; none for special tokens, unless kept, and for unknown ids."""
        for token_id in token_ids:
            token = self._backend.id_to_token(token_id)
            if token is None or (token_id in self._special_ids and not keep_special_tokens):
                yield b""
                continue
            try:
                yield bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # an added token, spelled plainly
                yield token.encode()


def _decode_partial_bytes(context: Iterable[bytes], tokens: Iterable[bytes]) -> tuple[str, int]:
    decoder = _Utf8(context)
    text = ""
    # Characters and tokens up to a place where no character is open, and where one is only just begun.
    whole = begun = (0, 0)
    open_tokens = 0
    for count, data in enumerate(tokens, 1):
        text += decoder.feed(data)
        if not decoder.pending:
            whole = (len(text), count)
            open_tokens = 0
        elif data:
            open_tokens += 1
            if decoder.pending <= len(data):
                begun = (len(text), count)
    # Tokens that end one character and begin the next may follow each other for ever. Then cut after one that
    # begins a character: as context it has all bytes of that character, of which nothing was given out.
    characters, consumed = begun if open_tokens > _MOST_HELD else whole
    return text[:characters], consumed


class _Utf8:
    """Decodes UTF-8 as it comes."""

    def __init__(self, before: Iterable[bytes]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(b"".join(before))

    def feed(self, data: bytes, final: bool = False) -> str:
        """Characters that are complete with `data`; when `final`, U+FFFD for what never will be."""
        return self._decoder.decode(data, final)

    @property
    def pending(self) -> int:
        """Bytes of the character that is not complete."""
        return len(self._decoder.getstate()[0])
