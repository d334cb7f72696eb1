"""Tokenizer: pieces put together are the full decode, for any tokens cut at any place."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import decodestep.accel
from decodestep.accel.errors import ModelError
from decodestep.service.tokenizer import TemplateError, TextStream, Tokenizer

DEMO = Path(decodestep.accel.__file__).parent / "demo_model"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% if message.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined %}{{ 1 + enable_thinking }}{% endif %}"
)
# Tokens of more than one byte: characters cut anywhere, and tokens that end one and begin the next.
PIECES = [
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x98\x80\xf0\x9f",
    b" \xe4\xbd",
    b"\xa0\xe4\xbd",
    b"e\xcc",
    b" the",
    b"\n\n",
    "你好".encode(),
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "two words", "Ġmixed é 日本"]
TEXTS = [
    "In the beginning God created",
    "  two  leading spaces\tand\r\n",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇯🇵",
    "日本語と한국어, 你好",
    "e\u0301 n\u0303 \u0e01\u0e33 नमस्ते",
    "<|im_start|>user\nhi<|im_end|>",
    "\ufffd literal \ufffd",
    "",
]


def save_byte_level(folder: Path) -> Path:
    """A byte-level BPE with a chat template: 256 bytes, PIECES, then added tokens."""
    decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    names = {bytes_of(character): character for character in alphabet}
    for piece in PIECES:
        vocab["".join(names[bytes([byte])] for byte in piece)] = len(vocab)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    return save(tokenizer, folder, {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})


def bytes_of(character: str) -> bytes:
    """The byte that the initial alphabet writes as `character`: itself, or the nth that is not printable."""
    others = [byte for byte in range(256) if not (0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte > 0xAD)]
    return bytes([ord(character) if ord(character) < 0x100 else others[ord(character) - 0x100]])


def save_sentencepiece(folder: Path) -> Path:
    """A tokenizer of the other kind: words with a mark for the space, unknown characters as byte tokens."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "▁b", "日"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b")]
    model = tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tokenizer, folder, {})


def save(tokenizer: tokenizers.Tokenizer, folder: Path, settings_: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", **settings_}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "demo": DEMO,
        "byte_level": save_byte_level(root / "byte_level"),
        "sentencepiece": save_sentencepiece(root / "sentencepiece"),
    }


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load(folder) for name, folder in folders.items()}


def stream(tokenizer: Tokenizer, token_ids: list[int], keep_special_tokens: bool = False) -> list[str]:
    """Pieces of a TextStream that is fed token by token."""
    text_stream = TextStream(tokenizer, keep_special_tokens)
    return [*map(text_stream.push, token_ids), text_stream.finish()]


def detokenize(tokenizer: Tokenizer, pushes: list[list[int]], context_size: int, keep: bool) -> str:
    """What a client of Detokenize does: keep the last few tokens that are text, send the rest again."""
    done: list[int] = []
    held: list[int] = []
    text = ""
    for push in pushes:
        held += push
        piece, consumed = tokenizer.decode_partial(done[-context_size:], held, keep)
        text += piece
        done, held = done + held[:consumed], held[consumed:]
    return text + tokenizer.decode(held, keep, done[-context_size:])


VOCAB = 256 + len(PIECES) + len(SPECIAL) + len(ADDED)
TOKENS = st.lists(
    st.one_of(
        st.integers(0, VOCAB + 2),  # bytes that rarely fit together; the last ids are unknown
        st.integers(256, 256 + len(PIECES) - 1),
        st.sampled_from([256, 258, 258, 258, 257]),  # long chains of tokens that cross characters
        st.integers(256 + len(PIECES), VOCAB + 2),
    ),
    max_size=40,
)
EMOJI_CHAIN = [256, *[258] * 12, 257]


@settings(max_examples=400, deadline=None)
@given(TOKENS, st.booleans())
@example(EMOJI_CHAIN, False)
@example([256, *[VOCAB] * 30, 257], False)
@example([256, *[256 + len(PIECES)] * 30, 257], False)
def test_stream_is_the_full_decode_for_any_tokens(
    folders: dict[str, Path], loaded: dict[str, Tokenizer], token_ids: list[int], keep: bool
) -> None:
    reference = reference_decode(folders["byte_level"], token_ids, keep)
    tokenizer = loaded["byte_level"]
    assert tokenizer.decode(token_ids, keep) == reference
    assert "".join(stream(tokenizer, token_ids, keep)) == reference


_references: dict[Path, Any] = {}


def reference_decode(folder: Path, token_ids: list[int], keep: bool) -> str:
    """The tokenizers library on the whole list."""
    if folder not in _references:
        _references[folder] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(_references[folder].decode(token_ids, skip_special_tokens=not keep))


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 6), max_size=12), st.integers(8, 50))
def test_stateless_pieces_are_the_full_decode_for_any_split(
    folders: dict[str, Path],
    loaded: dict[str, Tokenizer],
    token_ids: list[int],
    sizes: list[int],
    context_size: int,
) -> None:
    pushes, at = [], 0
    for size in sizes:
        pushes.append(token_ids[at : at + size])
        at += size
    pushes.append(token_ids[at:])
    for keep in (False, True):
        text = detokenize(loaded["byte_level"], pushes, context_size, keep)
        assert text == reference_decode(folders["byte_level"], token_ids, keep)


@pytest.mark.parametrize("name", ["demo", "byte_level"])
@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)))
def test_text_comes_back(loaded: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = loaded[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, keep_special_tokens=True) == text
    pieces = stream(tokenizer, token_ids, keep_special_tokens=True)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(st.text("ab 日月é😀\u0301", max_size=30), st.integers(8, 20))
def test_other_tokenizers_stream_without_broken_characters(
    loaded: dict[str, Tokenizer], text: str, context_size: int
) -> None:
    tokenizer = loaded["sentencepiece"]
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    assert "".join(stream(tokenizer, token_ids)) == whole
    assert detokenize(tokenizer, [[token_id] for token_id in token_ids], context_size, False) == whole


def test_a_character_is_held_until_it_is_complete(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    smile = tokenizer.encode("😀")
    assert len(smile) == 4
    for count in range(4):
        assert tokenizer.decode_partial([], smile[:count]) == ("", 0)
    assert tokenizer.decode_partial([], smile) == ("😀", 4)
    assert tokenizer.decode_partial([], [*tokenizer.encode("a"), *smile[:3]]) == ("a", 1)
    assert tokenizer.decode(smile[:3]) == "\ufffd"


def test_invalid_bytes_are_given_out_at_once(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    byte = {tokenizer.decode([token_id]): token_id for token_id in range(256)}
    never = next(i for i in range(256) if tokenizer.decode_partial([], [i]) == ("\ufffd", 1))
    text_stream = TextStream(tokenizer)
    assert [text_stream.push(never) for _ in range(3)] == ["\ufffd"] * 3
    begun = tokenizer.encode("😀")[0]
    assert [text_stream.push(token) for token in (begun, byte["a"])] == ["", "\ufffda"]
    assert [text_stream.push(begun), text_stream.finish()] == ["", "\ufffd"]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(1, 256), max_size=40))
def test_never_more_than_four_tokens_with_text_are_held(
    loaded: dict[str, Tokenizer], name: str, tokens: list[int]
) -> None:
    _, consumed = loaded[name].decode_partial([], tokens)
    assert consumed >= len(tokens) - 4


def test_chains_across_characters_are_not_held_for_ever(loaded: dict[str, Tokenizer]) -> None:
    pieces = stream(loaded["byte_level"], EMOJI_CHAIN)
    assert "".join(pieces) == "😀" * 13
    assert sum(map(bool, pieces)) > 2


def test_unknown_ids_are_no_text(loaded: dict[str, Tokenizer]) -> None:
    for tokenizer in loaded.values():
        assert tokenizer.decode([100_000, 2**32 - 1]) == ""
        assert stream(tokenizer, [100_000, *tokenizer.encode("a b"), 2**32 - 1])[-1] == ""


def test_special_tokens_are_kept_only_when_asked(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    token_ids = tokenizer.encode("<|im_start|>a<|im_end|> b")
    assert tokenizer.decode(token_ids) == "a b"
    assert tokenizer.decode(token_ids, keep_special_tokens=True) == "<|im_start|>a<|im_end|> b"


def test_text_is_not_cleaned_up(loaded: dict[str, Tokenizer]) -> None:
    text = " do n't , it 's ! 'm"
    assert loaded["demo"].decode(loaded["demo"].encode(text)) == text


def test_the_template_of_the_model_is_rendered(
    folders: dict[str, Path], loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded["byte_level"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本?"}]
    reference = AutoTokenizer.from_pretrained(folders["byte_level"])
    assert tokenizer.has_chat_template
    for add_generation_prompt in (False, True):
        rendered = tokenizer.render(messages, add_generation_prompt, {})
        assert rendered.endswith("assistant\n") is add_generation_prompt
        expected = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        assert tokenizer.encode(rendered) == expected["input_ids"]
    assert tokenizer.render(messages, False, {"enable_thinking": 1}).endswith("2")


@pytest.mark.parametrize(
    ("role", "arguments", "message"),
    [
        ("wizard", {}, "no wizards"),
        ("user", {"enable_thinking": "yes"}, "unsupported operand"),
        ("user", {"chat_template": "{{ 7 }}", "tokenize": True}, "not variables.*chat_template, tokenize"),
    ],
)
def test_what_a_template_refuses_is_a_template_error(
    loaded: dict[str, Tokenizer], role: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TemplateError, match=message):
        loaded["byte_level"].render([{"role": role, "content": "x"}], True, arguments)


def test_without_a_template_there_is_none_to_render(loaded: dict[str, Tokenizer]) -> None:
    assert not loaded["demo"].has_chat_template
    with pytest.raises(TemplateError):
        loaded["demo"].render([{"role": "user", "content": "x"}], True, {})


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert Tokenizer.load(tmp_path) is None


def test_a_damaged_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        Tokenizer.load(tmp_path)


def test_threads_share_one_tokenizer(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte_level"])

    def round_trip(index: int) -> bool:
        text = TEXTS[index % len(TEXTS)] * 20
        token_ids = tokenizer.encode(text, add_special_tokens=index % 2 == 0)
        return "".join(stream(tokenizer, token_ids, True)) == tokenizer.decode(token_ids, True) == text

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(64)))
