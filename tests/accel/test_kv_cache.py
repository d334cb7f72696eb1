"""Blocks of the KV cache: who gets which, how many there are, and how much memory they may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodestep.accel import kv_cache
from decodestep.accel.config import ModelConfig, RopeConfig
from decodestep.accel.errors import DeviceError, RowError
from decodestep.accel.kv_cache import (
    BlockAllocator,
    CachePlan,
    available_memory,
    blocks_for,
    plan_cache,
)

GIB = 2**30
# 2 tensors, 3 layers, 2 KV heads of 16 numbers: 192 numbers a position.
CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    attention_bias=False,
    tie_word_embeddings=True,
    rope=RopeConfig("default", 10000.0),
    dtype="float32",
    eos_token_ids=(),
)
FLOAT32_BLOCK = 192 * 4 * 8  # bytes of a block of 8 positions


# Each action names one of up to 6 sequences and what happens to it: grow by n blocks, or give back all but n.
ACTIONS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["grow", "shrink"]), st.integers(0, 12)))


@given(num_blocks=st.integers(1, 40), reserved=st.integers(0, 3), actions=ACTIONS)
def test_any_history_leaves_each_block_with_one_holder(
    num_blocks: int, reserved: int, actions: list[tuple[int, str, int]]
) -> None:
    reserved = min(reserved, num_blocks)
    allocator = BlockAllocator(num_blocks, reserved)
    free = set(range(reserved, num_blocks))
    held: list[list[int]] = [[] for _ in range(6)]
    assert allocator.capacity == len(free)
    for name, action, count in actions:
        blocks = held[name]
        if action == "shrink":
            allocator.release(blocks[count:])
            free |= set(blocks[count:])
            del blocks[count:]
        elif count > len(free):
            with pytest.raises(RowError) as caught:
                allocator.allocate(count, after=blocks[-1] if blocks else None)
            assert caught.value.reason == "NO_FREE_BLOCKS"
            assert caught.value.metadata == {"needed_blocks": str(count), "free_blocks": str(len(free))}
        else:
            taken = allocator.allocate(count, after=blocks[-1] if blocks else None)
            assert len(taken) == len(set(taken)) == count
            assert set(taken) <= free
            if blocks:  # as far as the blocks behind the last one are free they are the ones
                behind = list(range(blocks[-1] + 1, blocks[-1] + 1 + count))
                room = next((n for n, block in enumerate(behind) if block not in free), count)
                assert taken[:room] == behind[:room]
            free -= set(taken)
            blocks += taken
        assert allocator.num_free == len(free)
    for blocks in held:
        allocator.release(blocks)
    assert allocator.num_free == allocator.capacity
    assert sorted(allocator.allocate(allocator.capacity, after=None)) == list(range(reserved, num_blocks))


def test_a_refusal_takes_nothing() -> None:
    allocator = BlockAllocator(8, reserved=1)
    held = allocator.allocate(3, after=None)
    with pytest.raises(RowError, match="NO_FREE_BLOCKS: 5 KV blocks needed, 4 free"):
        allocator.allocate(5, after=held[-1])
    assert allocator.num_free == 4
    assert sorted(held + allocator.allocate(4, after=None)) == [1, 2, 3, 4, 5, 6, 7]


def test_nothing_is_allocated_from_a_full_cache_and_nothing_is_no_failure() -> None:
    allocator = BlockAllocator(3)
    held = allocator.allocate(3, after=None)
    assert allocator.allocate(0, after=held[-1]) == []
    with pytest.raises(RowError):
        allocator.allocate(1, after=None)


def test_the_last_block_is_followed_by_none() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(4, after=None) == [0, 1, 2, 3]
    allocator.release([0, 1])
    assert sorted(allocator.allocate(2, after=3)) == [0, 1]


def test_two_sequences_that_grow_by_turns_both_stay_consecutive() -> None:
    """So attention copies neither: the second one starts in the middle of what is free."""
    allocator = BlockAllocator(65, reserved=1)
    first, second = allocator.allocate(2, after=None), allocator.allocate(2, after=None)
    for _ in range(12):
        first += allocator.allocate(1, after=first[-1])
        second += allocator.allocate(1, after=second[-1])
    for blocks in (first, second):
        assert blocks == list(range(blocks[0], blocks[0] + 14))


def test_a_sequence_that_fits_into_one_run_gets_one() -> None:
    allocator = BlockAllocator(20)
    held = allocator.allocate(20, after=None)
    allocator.release([held[2], *held[5:8], *held[10:16]])
    taken = allocator.allocate(4, after=None)
    assert taken == list(range(taken[0], taken[0] + 4))
    assert set(taken) <= set(held[10:16])


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_blocks_for_rounds_up(block_size: int) -> None:
    for tokens in range(3 * block_size + 2):
        blocks = blocks_for(tokens, block_size)
        assert (blocks - 1) * block_size < tokens <= blocks * block_size


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many bytes are free."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(kv_cache, "available_memory", lambda: count)

    return set_free


def plan(max_tokens: int = 10**9, itemsize: int = 4, **stated: int) -> CachePlan:
    return plan_cache(CONFIG, itemsize, 8, max_tokens, **stated)


def test_stated_blocks(free: Callable[[int], None]) -> None:
    free(GIB)
    found = plan(num_blocks=7, max_tokens=1)
    assert found == CachePlan(7, 8, FLOAT32_BLOCK, "as --num-blocks says")
    assert found.num_tokens == 56
    assert found.num_bytes == 7 * FLOAT32_BLOCK


def test_stated_blocks_win_over_stated_memory(free: Callable[[int], None]) -> None:
    free(GIB)
    assert plan(num_blocks=7, memory=100 * FLOAT32_BLOCK).num_blocks == 7


def test_stated_memory_is_not_exceeded(free: Callable[[int], None]) -> None:
    free(GIB)
    found = plan(memory=10 * FLOAT32_BLOCK - 1, max_tokens=1)
    assert (found.num_blocks, found.reason) == (9, "as --kv-cache-memory says")
    assert plan(memory=10 * FLOAT32_BLOCK).num_blocks == 10


def test_half_of_what_is_free(free: Callable[[int], None]) -> None:
    free(GIB)
    found = plan()
    assert found.num_bytes <= GIB // 2 < found.num_bytes + FLOAT32_BLOCK
    assert found.reason == "half of the 1.0 GiB that are free"


def test_a_smaller_dtype_gives_more_blocks(free: Callable[[int], None]) -> None:
    free(GIB)
    assert plan(itemsize=2).block_bytes * 2 == FLOAT32_BLOCK
    assert plan(itemsize=2, memory=10 * FLOAT32_BLOCK).num_blocks == 20


def test_no_more_than_all_sequences_at_full_length(free: Callable[[int], None]) -> None:
    free(GIB)
    found = plan(max_tokens=4 * 128 + 1)
    assert (found.num_blocks, found.reason) == (65, "all sequences at full length")


def test_exactly_what_is_free_fits_and_a_block_more_does_not(free: Callable[[int], None]) -> None:
    free(50 * FLOAT32_BLOCK)
    assert plan(num_blocks=50).num_blocks == 50
    with pytest.raises(DeviceError, match=r"51 KV blocks take .* are free: .*--num-blocks"):
        plan(num_blocks=51)
    with pytest.raises(DeviceError, match="are free: state a smaller --kv-cache-memory"):
        plan(memory=51 * FLOAT32_BLOCK)


@pytest.mark.parametrize("stated", [{"memory": FLOAT32_BLOCK - 1}, {}], ids=["stated", "free"])
def test_not_even_one_block(stated: dict[str, int], free: Callable[[int], None]) -> None:
    free(2 * FLOAT32_BLOCK - 1)
    with pytest.raises(DeviceError, match=f"one block of 8 positions takes {FLOAT32_BLOCK} bytes"):
        plan(**stated)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the process into a cgroup `a/b`, whose files and those of `a` and of the root a test writes."""
    folders = [tmp_path / "a" / "b", tmp_path / "a", tmp_path]
    folders[0].mkdir(parents=True)
    monkeypatch.setattr(kv_cache, "_cgroup_folders", lambda: folders)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))

    def write(folder: str, **files: int | str) -> None:
        for name, content in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(f"{content}\n")

    return write


V1_STAT = "cache 5\nrss 7\ninactive_file 3000\nactive_file 400\nhierarchical_memory_limit 9"
V2_STAT = "anon 7\nfile 5\ninactive_anon 11\nactive_anon 13\ninactive_file 3000\nactive_file 400"


def test_without_a_limit_what_the_system_has(cgroups: Callable[..., None]) -> None:
    assert available_memory() == 8 * GIB
    cgroups("a/b", memory__max="max", memory__current=GIB)
    cgroups(".", memory__stat=V2_STAT)
    assert available_memory() == 8 * GIB


def test_version_2_the_limit_less_what_is_used_and_cannot_be_reclaimed(cgroups: Callable[..., None]) -> None:
    cgroups("a/b", memory__max=4 * GIB, memory__current=GIB)
    assert available_memory() == 3 * GIB
    cgroups("a/b", memory__stat=V2_STAT)
    assert available_memory() == 3 * GIB + 3400


def test_version_1_the_limit_less_what_is_used_and_cannot_be_reclaimed(cgroups: Callable[..., None]) -> None:
    cgroups("a/b", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB, memory__stat=V1_STAT)
    assert available_memory() == 3 * GIB + 3400


def test_version_1_writes_no_limit_as_a_huge_number(cgroups: Callable[..., None]) -> None:
    cgroups("a/b", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert available_memory() == 8 * GIB


@pytest.mark.parametrize("tight", ["a/b", "a", "."])
def test_the_tightest_limit_on_the_way_up_counts(tight: str, cgroups: Callable[..., None]) -> None:
    for folder in ("a/b", "a", "."):
        limit = 2 * GIB if folder == tight else 6 * GIB
        cgroups(folder, memory__max=limit, memory__current=GIB)
    assert available_memory() == GIB


def test_a_limit_that_is_passed_leaves_nothing(cgroups: Callable[..., None]) -> None:
    cgroups("a", memory__max=GIB, memory__current=2 * GIB)
    assert available_memory() == 0


def test_a_limit_above_what_the_system_has_gives_no_more(cgroups: Callable[..., None]) -> None:
    cgroups("a", memory__max=100 * GIB, memory__current=0)
    assert available_memory() == 8 * GIB


def test_the_memory_of_this_machine() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
