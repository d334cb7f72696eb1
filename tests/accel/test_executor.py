"""The executor: pieces of prompts, steps, logprobs, finish reasons, faults in one row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint
from torch.overrides import TorchFunctionMode
from transformers import Qwen3ForCausalLM

from decodestep.accel.errors import RowError
from decodestep.accel.executor import Executor, Task
from decodestep.accel.loader import Settings, load
from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sequences import FinishReason, Sequence

VOCAB = 160
CLOSE = 2e-5  # of float32 logprobs, between kernels for one row and for many


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), CONFIGS["untied"])


@pytest.fixture
def make(folder: Path) -> Callable[..., Executor]:
    def start(**settings: Any) -> Executor:
        defaults = {"num_blocks": 100, "block_size": 8, "max_sequences": 16, "max_prefill_tokens": 16}
        chosen = {"model": str(folder), "dtype": "float32", "max_rows": 8} | defaults | settings
        return load(Settings(**chosen), lambda line: None).executor

    return start


@pytest.fixture
def executor(make: Callable[..., Executor]) -> Executor:
    return make()


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def open_(executor: Executor, **params: Any) -> Sequence:
    return executor.table.open(SamplingParams(**params))


def task(executor: Executor, sequence: Sequence, ids: list[int], **options: Any) -> Task:
    """A row that has its blocks; prompt tokens count as prompt."""
    executor.table.reserve(sequence, sequence.length + len(ids))
    sequence.prompt_length = sequence.length + len(ids)
    return Task(sequence, np.array(ids, dtype=np.int32), **options)


def feed(executor: Executor, sequence: Sequence, ids: list[int], **options: Any) -> Task:
    """Prefill to the end."""
    one = task(executor, sequence, ids, prompt_logprobs=sequence.params.prompt_logprobs, **options)
    while not one.done:
        executor.prefill([one])
    return one


def step(executor: Executor, *sequences: Sequence, **options: Any) -> list[Task]:
    """Decode each one's pending token in one step."""
    tasks = []
    for sequence in sequences:
        executor.table.reserve(sequence, sequence.length + 1)
        tasks.append(Task(sequence, np.array([sequence.pending], dtype=np.int32), **options))
    executor.decode(tasks)
    return tasks


def token(one: Task) -> int:
    assert one.sampled is not None, one.error
    return one.sampled.token_id


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """float32 logits [tokens, vocab] in transformers."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return out

    return logits


def test_a_piece_holds_whole_rows_or_a_part_of_the_first(executor: Executor) -> None:
    tasks = [task(executor, open_(executor), prompt(count)) for count in (20, 10, 6, 7, 3)]
    seen = []
    while tasks:
        timing = executor.prefill(tasks)
        seen.append((timing.rows, timing.tokens, [one.fed for one in tasks]))
        tasks = [one for one in tasks if not one.done]
    assert seen == [
        (1, 16, [16, 0, 0, 0, 0]),
        (2, 14, [20, 10, 0, 0, 0]),  # 4 + 10, and 6 more would be too many
        (3, 16, [6, 7, 3]),
    ]


def test_a_piece_has_max_rows(executor: Executor) -> None:
    tasks = [task(executor, open_(executor), [1]) for _ in range(10)]
    assert executor.prefill(tasks).rows == executor.max_rows == 8
    assert [one.done for one in tasks] == [True] * 8 + [False] * 2


@pytest.mark.parametrize("size", [1, 7, 8, 16, 64])
def test_pieces_of_any_size_give_the_same(
    make: Callable[..., Executor], size: int, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    executor = make(max_prefill_tokens=size)
    ids = prompt(45)
    one = feed(executor, open_(executor, prompt_logprobs=3, logprobs=2), ids, return_logits=True)
    want = reference(ids)
    assert one.logits is not None
    assert np.abs(one.logits - want[-1].numpy()).max() <= 1e-4
    logprobs = want.double().log_softmax(-1)
    assert [told.token_id for told in one.prompt] == ids[1:]
    for at, told in enumerate(one.prompt):
        assert told.logprob == pytest.approx(float(logprobs[at, ids[at + 1]]), abs=1e-4)
        assert [best for best, _ in told.top] == logprobs[at].topk(3).indices.tolist()
    assert one.sampled is not None
    assert one.sampled.top[0] == (token(one), one.sampled.logprob)
    assert token(one) == int(want[-1].argmax())


def test_prompt_logprobs_go_on_where_the_sequence_ended(
    executor: Executor, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    """After a whole prompt, after a step, and after a prompt that was stopped between pieces."""
    sequence = open_(executor, prompt_logprobs=0)
    ids = prompt(20)
    told = feed(executor, sequence, ids).prompt
    step(executor, sequence)
    history = executor.table.history_np[sequence.slot]
    told += [None, *feed(executor, sequence, prompt(5, seed=1)).prompt]
    stopped = task(executor, sequence, prompt(30, seed=2), prompt_logprobs=0)
    executor.prefill([stopped])
    executor.settle(stopped)
    told += stopped.prompt + feed(executor, sequence, prompt(4, seed=3)).prompt
    ids = history[: sequence.length].tolist()
    assert len(ids) == 20 + 1 + 5 + 16 + 4 == len(told) + 1
    logprobs = reference(ids).log_softmax(-1)
    for at, one in enumerate(told):
        if one is not None:  # the step's token: no prompt
            assert one.token_id == ids[at + 1]
            assert one.logprob == pytest.approx(float(logprobs[at, ids[at + 1]]), abs=1e-4)


def test_behind_a_cut_whose_draw_failed_no_logprob_is_made_up(executor: Executor) -> None:
    sequence = open_(executor, prompt_logprobs=0)
    feed(executor, sequence, prompt(20))
    executor.table.truncate(sequence, 10)
    row = feed(executor, sequence, [7], bitmask=np.zeros(VOCAB // 32, dtype=np.uint32))
    assert row.error is not None
    executor.table.truncate(sequence, 10)
    ids = prompt(4, seed=1)
    assert [told.token_id for told in feed(executor, sequence, ids).prompt] == ids[1:]


def test_neighbours_change_nothing(executor: Executor) -> None:
    """Greedy and seeded, in one step with others of other lengths, and alone."""
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 5, "logprobs": 4},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "seed": 6, "presence_penalty": 0.7},
        {"repetition_penalty": 1.4, "logprobs": 0},
        {"temperature": 0.7, "min_p": 0.1, "seed": 7, "logit_bias": ((3, 4.0), (9, -5.0))},
    ]
    alone = []
    for index, values in enumerate(params):
        sequence = open_(executor, **values)
        tokens = [token(feed(executor, sequence, prompt(3 + 9 * index, seed=index)))]
        tokens += [token(step(executor, sequence)[0]) for _ in range(30)]
        alone.append(tokens)
        executor.table.close(sequence)
    order = [3, 1, 4, 0, 2]
    sequences = [open_(executor, **params[index]) for index in order]
    first = [
        feed(executor, one, prompt(3 + 9 * index, seed=index))
        for one, index in zip(sequences, order, strict=True)
    ]
    together = [[token(one)] for one in first]
    for number in range(30):
        rows = sequences if number % 3 else sequences[::-1]
        for one in step(executor, *rows):
            together[sequences.index(one.sequence)].append(token(one))
    assert together == [alone[index] for index in order]


def test_finish_reasons(make: Callable[..., Executor]) -> None:
    executor = make(max_context=24)
    greedy = open_(executor)
    first = token(feed(executor, greedy, prompt(5)))
    assert greedy.finish is None
    stop = open_(executor, stop_token_ids=(first,))
    feed(executor, stop, prompt(5))
    assert stop.finish is FinishReason.STOP
    executor.table.end_token_ids = frozenset({first})
    for ignore_eos, want in ((False, FinishReason.END_TOKEN), (True, None)):
        sequence = open_(executor, ignore_eos=ignore_eos)
        feed(executor, sequence, prompt(5))
        assert sequence.finish is want
    executor.table.end_token_ids = frozenset()
    short = open_(executor, max_tokens=3)
    reasons = [feed(executor, short, prompt(5)) and short.finish]
    reasons += [step(executor, short) and short.finish for _ in range(2)]
    assert reasons == [None, None, FinishReason.LENGTH]
    assert executor.table.num_output_tokens(short) == 3


def test_the_last_position_is_filled_and_no_more(
    make: Callable[..., Executor], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    executor = make(max_context=24)
    sequence = open_(executor)
    tokens = [token(feed(executor, sequence, prompt(20)))]
    while sequence.finish is None:
        tokens.append(token(step(executor, sequence)[0]))
    assert sequence.finish is FinishReason.CONTEXT
    assert sequence.length == 24
    ids = prompt(20) + tokens
    assert tokens == reference(ids[:-1])[19:].argmax(-1).tolist()
    whole = open_(executor)
    feed(executor, whole, prompt(24))
    assert whole.finish is FinishReason.CONTEXT


def test_a_full_cache_refuses_and_changes_nothing(make: Callable[..., Executor]) -> None:
    executor = make(num_blocks=6)
    one, other = open_(executor), open_(executor)
    want = token(feed(executor, one, prompt(32)))  # 4 blocks of 6
    with pytest.raises(RowError) as refused:
        executor.table.reserve(other, 17)
    assert (refused.value.reason, refused.value.metadata["free_blocks"]) == ("NO_FREE_BLOCKS", "2")
    assert executor.table.allocator.num_free == 2
    feed(executor, other, prompt(16))  # the last two
    with pytest.raises(RowError):
        executor.table.reserve(one, 33)
    executor.table.close(other)
    step(executor, one)
    assert executor.table.history_np[one.slot, 32] == want


def test_truncated_sequences_go_on_as_if_they_had_never_been_longer(executor: Executor) -> None:
    sequence = open_(executor, temperature=1.0, seed=3, frequency_penalty=0.5)
    feed(executor, sequence, prompt(19))
    sequence.prompt_length = 19
    tokens = [sequence.pending, *(token(step(executor, sequence)[0]) for _ in range(12))]
    free = executor.table.allocator.num_free
    executor.table.truncate(sequence, 21)
    assert executor.table.allocator.num_free == free + 1  # positions 24 to 31
    sequence.pending = tokens[2]
    assert [token(step(executor, sequence)[0]) for _ in range(10)] == tokens[3:]


def test_damaged_kv_fails_its_own_row_only(executor: Executor) -> None:
    ids = [prompt(9, seed=seed) for seed in range(3)]
    alone = []
    for one in ids:
        sequence = open_(executor)
        feed(executor, sequence, one)
        alone.append([token(step(executor, sequence)[0]) for _ in range(4)])
        executor.table.close(sequence)
    sequences = [open_(executor) for _ in ids]
    for sequence, one in zip(sequences, ids, strict=True):
        feed(executor, sequence, one)
    at = sequences[1].blocks[0] * executor.table.block_size
    executor.attention._values[0][at] = float("nan")
    for number in range(4):
        rows = step(executor, *sequences)
        assert [token(rows[0]), token(rows[2])] == [alone[0][number], alone[2][number]]
        assert rows[1].error is not None
        assert rows[1].error.reason == "LOGITS_NOT_FINITE"
        assert rows[1].sampled is None
        executor.table.truncate(sequences[1], rows[1].start_length)


def test_masks_hold_for_one_draw(executor: Executor) -> None:
    sequence, other = open_(executor), open_(executor)
    feed(executor, sequence, prompt(5))
    feed(executor, other, prompt(5))
    only = np.zeros(VOCAB // 32, dtype=np.uint32)
    only[40 // 32] = 1 << 40 % 32
    executor.table.reserve(sequence, 6)
    executor.table.reserve(other, 6)
    masked = Task(sequence, np.array([1], dtype=np.int32), bitmask=only)
    plain = Task(other, np.array([1], dtype=np.int32))
    executor.decode([masked, plain])
    assert token(masked) == 40
    assert token(plain) != 40


def test_an_append_without_a_draw_draws_nothing(executor: Executor) -> None:
    sequence = open_(executor)
    first = feed(executor, sequence, prompt(5), samples=False)
    assert first.sampled is None
    assert sequence.pending is None
    logits = feed(executor, sequence, prompt(5), samples=False, return_logits=True)
    assert logits.sampled is None
    assert logits.logits is not None
    assert logits.logits.shape == (VOCAB,)


class _HostCopies(TorchFunctionMode):
    """Counts what would wait for a device: values that become Python objects."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in {"tolist", "item", "__bool__", "__int__", "__float__", "nonzero", "cpu"}:
            self.seen.append(name)
        return func(*args, **kwargs or {})


def test_a_step_copies_to_the_host_once(executor: Executor) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 1, "top_p": 0.9, "logprobs": 5},
        {},
        {"repetition_penalty": 1.2, "min_tokens": 50},
        {"temperature": 1.0, "seed": 2, "top_k": 7, "min_p": 0.02, "frequency_penalty": 1.0},
    ]
    sequences = [open_(executor, **values) for values in params]
    for sequence in sequences:
        feed(executor, sequence, prompt(6))
    with _HostCopies() as copies:
        step(executor, *sequences)
    assert copies.seen == ["tolist"]


def test_a_flat_distribution_costs_one_copy_more(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, {"vocab_size": 2000})
    settings = Settings(str(folder), dtype="float32", num_blocks=20, max_sequences=4)
    executor = load(settings, lambda line: None).executor
    flat = open_(executor, temperature=100.0, top_p=0.9, seed=1)
    feed(executor, flat, [5])
    with _HostCopies() as copies:
        step(executor, flat)
    assert copies.seen == ["tolist", "tolist"]
