"""The model against transformers: float32 logits, any chunking, any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint
from transformers import Qwen3ForCausalLM as Reference

from decodestep.accel.attention.base import AttentionMetadata
from decodestep.accel.attention.cpu import CpuAttention
from decodestep.accel.config import ModelConfig
from decodestep.accel.forward_context import ForwardContext
from decodestep.accel.kv_cache import BlockAllocator, blocks_for
from decodestep.accel.models.qwen3 import Qwen3ForCausalLM
from decodestep.accel.source import DEMO_FOLDER
from decodestep.accel.weights import load_weights

BLOCK = 8
AGAINST_REFERENCE = 1e-4


def against_itself(logits: torch.Tensor) -> float:
    """What float32 leaves open between kernels for one row and for many: a few units in the last place.

    float32 differs from float64 as much. 1e-5 up to logits of 5, then in proportion.
    """
    return max(1e-5, 2e-6 * float(logits.abs().max()))


class Rig:
    """A model with a paged cache, stepped by hand."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, num_blocks: int = 400) -> None:
        self.config = ModelConfig.from_folder(folder)
        with torch.device("meta"):
            self.model = Qwen3ForCausalLM(self.config, dtype)
        load_weights(self.model, folder, self.config, dtype, lambda done, total: None)
        self.attention = CpuAttention(self.config, num_blocks, BLOCK, dtype)
        self.allocator = BlockAllocator(num_blocks, reserved=1)
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def forward(self, rows: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Append tokens to each sequence; logits [tokens, vocab] of each."""
        tokens, positions, slots, counts, lengths = [], [], [], [], []
        for name, ids in rows.items():
            start = self.lengths.get(name, 0)
            blocks = self.blocks.setdefault(name, [])
            end = start + len(ids)
            missing = blocks_for(end, BLOCK) - len(blocks)
            if missing > 0:
                blocks += self.allocator.allocate(missing, after=blocks[-1] if blocks else None)
            tokens += ids
            positions += range(start, end)
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)]
            counts.append(len(ids))
            lengths.append(end)
            self.lengths[name] = end
        tables = np.zeros((len(rows), max(len(self.blocks[name]) for name in rows)), dtype=np.int32)
        for row, name in enumerate(rows):
            tables[row, : len(self.blocks[name])] = self.blocks[name]
        self.attention.prepare(
            AttentionMetadata(counts, lengths, torch.from_numpy(tables), torch.tensor(slots)),
            graph_mode=False,
        )
        with torch.inference_mode():
            hidden = self.model(torch.tensor(tokens), torch.tensor(positions), ForwardContext(self.attention))
            logits = self.model.logits(hidden)
        return dict(zip(rows, logits.split(counts), strict=True))


def random_tokens(config: ModelConfig, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


@pytest.fixture(params=["demo", *CONFIGS])
def folder(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Path:
    return DEMO_FOLDER if request.param == "demo" else checkpoint_of(request.param)


def test_prefill_and_64_greedy_steps_are_those_of_transformers(folder: Path) -> None:
    rig = Rig(folder)
    reference = Reference.from_pretrained(folder, dtype=torch.float32)
    prompt = random_tokens(rig.config, 37, seed=1)
    ours = rig.forward({0: prompt})[0]
    with torch.inference_mode():
        out = reference(torch.tensor([prompt]), use_cache=True)
    assert (ours - out.logits[0]).abs().max() <= AGAINST_REFERENCE
    spread = out.logits[0].std()
    assert spread > 100 * AGAINST_REFERENCE  # or the comparison would say nothing
    ours, theirs = ours[-1], out.logits[0, -1]
    for _ in range(64):
        token = int(theirs.argmax())
        assert int(ours.argmax()) == token
        ours = rig.forward({0: [token]})[0][0]
        with torch.inference_mode():
            out = reference(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        theirs = out.logits[0, -1]
        assert (ours - theirs).abs().max() <= AGAINST_REFERENCE


@pytest.mark.parametrize("pieces", [[1] * 45, [8] * 5 + [5], [7, 1, 8, 16, 13], [44, 1]])
def test_any_chunking_gives_the_same(folder: Path, pieces: list[int]) -> None:
    rig = Rig(folder)
    prompt = random_tokens(rig.config, 45, seed=2)
    whole = rig.forward({0: prompt})[0]
    at, parts = 0, []
    for count in pieces:
        parts.append(rig.forward({1: prompt[at : at + count]})[1])
        at += count
    assert (torch.cat(parts) - whole).abs().max() <= against_itself(whole)


def test_neighbours_change_nothing(folder: Path) -> None:
    rig = Rig(folder)
    prompts = [random_tokens(rig.config, count, seed=count) for count in (1, 7, 8, 9, 16, 33, 70)]
    alone = {}
    for name, prompt in enumerate(prompts):
        alone[name] = [rig.forward({name: prompt[:-1] or prompt})[name][-1]]
        alone[name].append(rig.forward({name: prompt[-1:]})[name][-1])
    names = [100 + name for name in range(len(prompts))][::-1]
    # All in one ragged forward, scattered blocks included, then a decode step of all.
    first = rig.forward({name: prompts[name - 100][:-1] or prompts[name - 100] for name in names})
    second = rig.forward({name: prompts[name - 100][-1:] for name in names})
    for name in names:
        for ours, want in zip((first, second), alone[name - 100], strict=True):
            assert (ours[name][-1] - want).abs().max() <= against_itself(want)
            assert int(ours[name][-1].argmax()) == int(want.argmax())


def test_scattered_blocks_change_nothing(folder: Path) -> None:
    rig = Rig(folder)
    prompt = random_tokens(rig.config, 60, seed=3)
    whole = rig.forward({0: prompt})[0]
    rig.blocks[1] = [51, 13, 14, 90, 7, 33, 32, 8]
    rig.allocator.allocate(300, after=None)
    parts = [rig.forward({1: prompt[:30]})[1], rig.forward({1: prompt[30:]})[1]]
    assert (torch.cat(parts) - whole).abs().max() <= against_itself(whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    exact, rig = Rig(DEMO_FOLDER), Rig(DEMO_FOLDER, dtype)
    prompt = random_tokens(rig.config, 50, seed=4)
    want = exact.forward({0: prompt})[0]
    have = torch.cat([rig.forward({0: prompt[:20]})[0], *(rig.forward({0: [t]})[0] for t in prompt[20:])])
    error = (have - want).abs().max() / want.std()
    assert error < (0.15 if dtype is torch.bfloat16 else 0.03)


def test_positions_up_to_the_end_of_the_context(checkpoint_of: Callable[[str], Path]) -> None:
    for name in ("yarn-mscale", "old-yarn", "linear", "untied"):
        folder = checkpoint_of(name)
        rig = Rig(folder)
        prompt = random_tokens(rig.config, rig.config.max_position_embeddings, seed=5)
        ours = rig.forward({0: prompt})[0]
        with torch.inference_mode():
            theirs = Reference.from_pretrained(folder, dtype=torch.float32)(torch.tensor([prompt])).logits[0]
        assert (ours - theirs).abs().max() <= AGAINST_REFERENCE


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_embedding_rows_are_kept_in_16_bits_only_where_nothing_is_lost(
    tmp_path: Path, stored: torch.dtype
) -> None:
    tied = {"tie_word_embeddings": True}
    rig = Rig(make_checkpoint(tmp_path, tied, dtype=stored))
    embedding = rig.model.model.embed_tokens
    want = Reference.from_pretrained(tmp_path, dtype=torch.float32).model.embed_tokens.weight
    if embedding.is_packed:
        assert embedding.weight.dtype is stored
    have = embedding(torch.arange(rig.config.vocab_size))
    assert have.dtype is torch.float32
    assert torch.equal(have, want)
