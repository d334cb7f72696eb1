"""Sequences: the slots and blocks that they hold, and when a token finishes one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodestep.accel.errors import RowError
from decodestep.accel.kv_cache import BlockAllocator, blocks_for
from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sampler.state import SamplingState
from decodestep.accel.sequences import FinishReason, Sequence, SequenceTable

BLOCK = 4
CONTEXT = 22  # not a multiple of the block
SLOTS = 3
END = 9
GREEDY = SamplingParams()


def make_table(num_blocks: int = 20) -> SequenceTable:
    ends = frozenset({END, END + 1})
    sampling = SamplingState(SLOTS, 50, ends, torch.device("cpu"))
    return SequenceTable(SLOTS, CONTEXT, BLOCK, BlockAllocator(num_blocks + 1, 1), sampling, ends)


def opened(table: SequenceTable, length: int = 0, prompt_length: int = 0, **params: object) -> Sequence:
    """A sequence that has been fed `length` tokens."""
    sequence = table.open(SamplingParams(**params))  # type: ignore[arg-type]
    table.reserve(sequence, length)
    sequence.length, sequence.prompt_length = length, prompt_length
    return sequence


def check_blocks(table: SequenceTable, sequences: list[Sequence]) -> None:
    """Each block has one holder, the rest is free, and the device's tables name them in order."""
    held = [block for sequence in sequences for block in sequence.blocks]
    assert len(held) == len(set(held))
    assert 0 not in held  # reserved
    assert table.allocator.num_free == table.allocator.capacity - len(held)
    for sequence in sequences:
        row = table.block_tables[sequence.slot, : len(sequence.blocks)]
        assert row.tolist() == sequence.blocks


def test_a_new_sequence_is_empty() -> None:
    sequence = make_table().open(GREEDY)
    assert (sequence.length, sequence.prompt_length, sequence.blocks) == (0, 0, [])
    assert (sequence.pending, sequence.finish) == (None, None)
    assert not sequence.is_broken
    assert not sequence.seed_told


def test_living_sequences_have_slots_of_their_own() -> None:
    table = make_table()
    sequences = [table.open(GREEDY) for _ in range(SLOTS)]
    assert sorted(sequence.slot for sequence in sequences) == [0, 1, 2]
    assert table.num_sequences == SLOTS


def test_one_sequence_too_many_changes_nothing_and_a_slot_comes_back() -> None:
    table = make_table()
    sequences = [opened(table, length=5) for _ in range(SLOTS)]
    with pytest.raises(RowError, match="3 sequences live") as caught:
        table.open(GREEDY)
    assert caught.value.reason == "NO_FREE_SEQUENCES"
    assert caught.value.metadata == {"max_sequences": "3"}
    assert table.num_sequences == SLOTS
    assert table.close(sequences[1]) == 2
    assert table.num_sequences == SLOTS - 1
    assert table.open(GREEDY).slot == sequences[1].slot
    check_blocks(table, [sequences[0], sequences[2]])


def test_sampling_follows_the_sequence_into_its_slot() -> None:
    table = make_table()
    first = table.open(SamplingParams(temperature=0.5, seed=7, logit_bias=((3, 1.0),)))
    assert table.sampling.params[first.slot] is first.params
    assert float(table.sampling.temperature[first.slot]) == 0.5
    table.close(first)
    second = table.open(GREEDY)
    assert second.slot == first.slot
    assert table.sampling.params[second.slot] is GREEDY
    assert float(table.sampling.temperature[second.slot]) == 1.0
    assert table.sampling.bias[second.slot] is None


def test_new_sampling_has_a_seed_to_be_told() -> None:
    table = make_table()
    sequence = table.open(GREEDY)
    sequence.seed_told = True
    params = SamplingParams(temperature=2.0)
    table.set_params(sequence, params)
    assert not sequence.seed_told
    assert sequence.params is params
    assert float(table.sampling.temperature[sequence.slot]) == 2.0


def test_history_and_block_tables_are_one_memory_on_both_sides() -> None:
    table = make_table()
    assert table.history.shape == (SLOTS, CONTEXT)
    assert table.block_tables.shape == (SLOTS, blocks_for(CONTEXT, BLOCK))
    table.history_np[1, 2] = 33
    table.block_tables_np[2, 1] = 4
    assert int(table.history[1, 2]) == 33
    assert int(table.block_tables[2, 1]) == 4


@pytest.mark.parametrize(
    ("length", "blocks"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2), (CONTEXT - 2, 5), (CONTEXT, 6)]
)
def test_reserve_holds_as_many_blocks_as_the_length_takes(length: int, blocks: int) -> None:
    table = make_table()
    sequence = table.open(GREEDY)
    table.reserve(sequence, length)
    assert len(sequence.blocks) == blocks
    assert sequence.length == 0
    check_blocks(table, [sequence])


def test_reserve_takes_only_what_is_missing_and_keeps_what_is_held() -> None:
    table = make_table()
    sequence = opened(table, length=7)
    before = list(sequence.blocks)
    table.reserve(sequence, 8)
    table.reserve(sequence, 3)
    assert sequence.blocks == before
    table.reserve(sequence, 9)
    assert sequence.blocks[:2] == before
    assert len(sequence.blocks) == 3
    check_blocks(table, [sequence])


def test_reserve_in_a_full_cache_changes_nothing() -> None:
    table = make_table(num_blocks=5)
    first, second = opened(table, length=10), opened(table, length=4)
    tables, blocks = table.block_tables.clone(), list(second.blocks)
    with pytest.raises(RowError) as caught:
        table.reserve(second, 16)
    assert caught.value.reason == "NO_FREE_BLOCKS"
    assert caught.value.metadata == {"needed_blocks": "3", "free_blocks": "1"}
    assert second.blocks == blocks
    assert torch.equal(table.block_tables, tables)
    check_blocks(table, [first, second])
    table.close(first)
    table.reserve(second, 16)
    check_blocks(table, [second])


@pytest.mark.parametrize("length", range(CONTEXT + 1))
def test_truncate_frees_exactly_the_blocks_beyond(length: int) -> None:
    table = make_table()
    other, sequence = opened(table, length=9), opened(table, length=CONTEXT)
    before = list(sequence.blocks)
    table.truncate(sequence, length)
    assert sequence.length == length
    assert sequence.blocks == before[: blocks_for(length, BLOCK)]
    check_blocks(table, [other, sequence])


def test_truncate_frees_blocks_that_were_reserved_and_not_reached() -> None:
    table = make_table()
    sequence = opened(table, length=5)
    table.reserve(sequence, CONTEXT)
    table.truncate(sequence, 5)
    assert len(sequence.blocks) == 2
    check_blocks(table, [sequence])


def test_truncate_into_the_prompt_shortens_it() -> None:
    table = make_table()
    sequence = opened(table, length=12, prompt_length=8)
    table.truncate(sequence, 10)
    assert (sequence.prompt_length, table.num_output_tokens(sequence)) == (8, 2)
    table.truncate(sequence, 6)
    assert (sequence.prompt_length, table.num_output_tokens(sequence)) == (6, 0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["reserve", "truncate", "close"]), st.integers(0, CONTEXT)
        )
    )
)
def test_any_history_leaves_each_block_with_one_holder(actions: list[tuple[int, str, int]]) -> None:
    table = make_table(num_blocks=11)
    living: dict[int, Sequence] = {}
    for name, action, length in actions:
        sequence = living.get(name)
        if sequence is None:
            sequence = living[name] = table.open(GREEDY)
        held = len(sequence.blocks)
        if action == "close":
            assert table.close(living.pop(name)) == held
        elif action == "truncate":
            table.truncate(sequence, min(length, sequence.length))
        elif blocks_for(length, BLOCK) - held > table.allocator.num_free:
            with pytest.raises(RowError):
                table.reserve(sequence, length)
            assert len(sequence.blocks) == held
        else:
            table.reserve(sequence, length)
            sequence.length = max(length, sequence.length)
            assert len(sequence.blocks) == max(held, blocks_for(length, BLOCK))
        check_blocks(table, list(living.values()))
        assert table.num_sequences == len(living)


@pytest.mark.parametrize("pending", [None, 5])
def test_output_tokens_are_those_behind_the_prompt_and_the_pending_one(pending: int | None) -> None:
    table = make_table()
    sequence = opened(table, length=9, prompt_length=6)
    sequence.pending = pending
    assert table.num_output_tokens(sequence) == (3 if pending is None else 4)


@pytest.mark.parametrize(
    ("params", "token", "finish"),
    [
        ({}, 5, None),
        ({}, END, FinishReason.END_TOKEN),
        ({}, END + 1, FinishReason.END_TOKEN),
        ({"ignore_eos": True}, END, None),
        ({"ignore_eos": True, "stop_token_ids": (END,)}, END, FinishReason.STOP),
        ({"stop_token_ids": (5, 6)}, 6, FinishReason.STOP),
        ({"stop_token_ids": (5, 6)}, 7, None),
        ({"max_tokens": 4}, 5, None),
        ({"max_tokens": 3}, 5, FinishReason.LENGTH),
        ({"max_tokens": 1}, 5, FinishReason.LENGTH),
        # Of several reasons the first of these is told: end token, stop token, length, context.
        ({"stop_token_ids": (END,), "max_tokens": 3}, END, FinishReason.END_TOKEN),
        ({"stop_token_ids": (5,), "max_tokens": 3}, 5, FinishReason.STOP),
    ],
)
def test_finish_reasons(params: dict[str, object], token: int, finish: FinishReason | None) -> None:
    """After a prompt of 6 tokens and 2 generated ones: the token is the third."""
    table = make_table()
    sequence = opened(table, length=8, prompt_length=6, **params)
    table.accept(sequence, token)
    assert (sequence.pending, sequence.finish) == (token, finish)
    assert table.num_output_tokens(sequence) == 3


@pytest.mark.parametrize(
    ("length", "params", "finish"),
    [
        (CONTEXT - 1, {}, None),  # the token can still be fed
        (CONTEXT, {}, FinishReason.CONTEXT),
        (CONTEXT, {"max_tokens": 3}, FinishReason.LENGTH),
        (CONTEXT, {"max_tokens": 4}, FinishReason.CONTEXT),
        (CONTEXT, {"stop_token_ids": (5,)}, FinishReason.STOP),
        (CONTEXT, {"ignore_eos": True}, FinishReason.CONTEXT),
    ],
)
def test_the_end_of_the_context(length: int, params: dict[str, object], finish: FinishReason | None) -> None:
    table = make_table()
    sequence = opened(table, length=length, prompt_length=CONTEXT - 2, **params)
    table.accept(sequence, 5)
    assert sequence.finish is finish


def test_an_end_token_at_the_end_of_the_context() -> None:
    table = make_table()
    sequence = opened(table, length=CONTEXT, prompt_length=1, max_tokens=1)
    table.accept(sequence, END)
    assert sequence.finish is FinishReason.END_TOKEN


def test_a_token_that_does_not_finish_takes_an_earlier_finish_back() -> None:
    table = make_table()
    sequence = opened(table, length=3, prompt_length=3)
    table.accept(sequence, END)
    table.accept(sequence, 5)
    assert (sequence.pending, sequence.finish) == (5, None)


def test_closing_all_gives_the_whole_cache_back() -> None:
    table = make_table(num_blocks=12)
    sequences = [opened(table, length=length) for length in (1, 9, 22)]
    assert sum(table.close(sequence) for sequence in sequences) == 1 + 3 + 6
    assert table.num_sequences == 0
    assert table.allocator.num_free == table.allocator.capacity == 12
    assert np.array_equal(np.sort(table.allocator.allocate(12, after=None)), np.arange(1, 13))
