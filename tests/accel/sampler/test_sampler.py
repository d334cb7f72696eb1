"""The sampler against float64, known answers and statistics; a row alone and in a batch, bit for bit."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sampler.random import Purpose, philox4x32, uniforms
from decodestep.accel.sampler.sampler import RowStatus, Sampler, SampleRows, prompt_logprobs
from decodestep.accel.sampler.state import SamplingState

CLOSE = 1e-5
ENDS = frozenset({3})


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # kat_vectors of Random123
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]
) -> None:
    assert [int(word[0]) for word in philox4x32(words(*counter), words(*key))] == list(want)


def test_random_numbers_are_uniform_and_functions_of_seed_and_position() -> None:
    numbers = uniforms([9] * 20000, list(range(20000)), Purpose.SAMPLE)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square with 19 degrees, p = 0.001
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03
    assert uniforms([9], [777], Purpose.SAMPLE)[0] == numbers[777]
    assert uniforms([10], [777], Purpose.SAMPLE)[0] != numbers[777]


class Rig:
    """A sampler with one slot a row."""

    def __init__(self, params: list[SamplingParams], vocab: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = len(params)
        self.params = params
        self.state = SamplingState(count, vocab, ENDS, torch.device("cpu"))
        for slot, one in enumerate(params):
            self.state.set(slot, one)
        self.sampler = Sampler(self.state)
        self.logits = 3 * torch.randn(count, vocab, generator=generator)
        self.history = torch.randint(vocab, (count, 64), generator=generator).int()
        self.lengths = torch.randint(1, 65, (count,), generator=generator).tolist()
        self.prompts = [random.Random(seed + row).randint(0, self.lengths[row]) for row in range(count)]
        self.masks: dict[int, np.ndarray] = {}

    def rows(self, chosen: list[int]) -> SampleRows:
        return SampleRows(
            chosen,
            [self.lengths[row] for row in chosen],
            [self.prompts[row] for row in chosen],
            {place: self.masks[row] for place, row in enumerate(chosen) if row in self.masks},
        )

    def sample(self, chosen: list[int]) -> list[tuple[object, ...]]:
        out = self.sampler.sample(self.logits[chosen], self.rows(chosen), self.history)
        return list(zip(out.token_ids, out.status, out.logprobs, out.top_logprobs, strict=True))

    def reference(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Processed logits, and the probabilities that are drawn from, in float64."""
        p, vocab = self.params[row], self.logits.shape[1]
        logits = self.logits[row].double().numpy().copy()
        fed = self.history[row, : self.lengths[row]].tolist()
        generated = fed[self.prompts[row] :]
        for token in set(fed):
            value = logits[token]
            logits[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        for token in set(generated):
            logits[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
        for token, bias in p.logit_bias:
            logits[token] += bias
        if row in self.masks:
            for token in range(vocab):
                if not int(self.masks[row][token // 32]) >> (token % 32) & 1:
                    logits[token] = -math.inf
        if len(generated) < p.min_tokens:
            logits[[*ENDS, *p.stop_token_ids]] = -math.inf
        if p.temperature == 0:
            return logits, (np.arange(vocab) == logits.argmax()).astype(float)
        probs = np.exp((logits - logits.max()) / p.temperature)
        probs /= probs.sum()
        if p.top_k:
            probs[logits < np.sort(logits)[::-1][min(p.top_k, vocab) - 1]] = 0
        if p.top_p < 1:
            order = np.argsort(-probs, kind="stable")
            mass = probs[order].cumsum()
            last = order[min(int((mass < p.top_p * mass[-1]).sum()), vocab - 1)]
            probs[logits < logits[last]] = 0
        probs[probs < p.min_p * probs.max()] = 0
        return logits, probs / probs.sum()


def mixed(count: int, vocab: int, seed: int) -> Rig:
    r = random.Random(seed)
    params = [
        SamplingParams(
            temperature=r.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
            top_k=r.choice([0, 0, 1, 5, 40, 10**6]),
            top_p=r.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
            min_p=r.choice([0.0, 0.0, 0.05, 0.9]),
            repetition_penalty=r.choice([1.0, 1.0, 1.3, 0.7]),
            presence_penalty=r.choice([0.0, 0.5, -1.0]),
            frequency_penalty=r.choice([0.0, 0.2, -0.4]),
            logit_bias=r.choice([(), ((1, 2.5), (vocab - 1, -100.0))]),
            seed=r.getrandbits(64),
            stop_token_ids=r.choice([(), (5, 7)]),
            min_tokens=r.choice([0, 100]),
            logprobs=r.choice([None, 0, 3]),
            processed_logprobs=r.random() < 0.5,
        )
        for _ in range(count)
    ]
    rig = Rig(params, vocab, seed)
    for row in range(0, count, 5):
        words = np.array([r.getrandbits(32) for _ in range(-(-vocab // 32))], dtype=np.uint32)
        rig.masks[row] = words
    return rig


@pytest.mark.parametrize(("vocab", "count"), [(33, 300), (160, 300), (1000, 200), (2048, 200), (151936, 12)])
def test_mixed_rows_are_those_of_float64(vocab: int, count: int) -> None:
    rig = mixed(count, vocab, seed=vocab)
    differing = 0
    for row, (token, status, logprob, top) in enumerate(rig.sample(list(range(count)))):
        p = rig.params[row]
        logits, probs = rig.reference(row)
        assert status is RowStatus.OK
        cumulated = probs.cumsum()
        number = uniforms([p.seed], [rig.lengths[row]], Purpose.SAMPLE)[0] if p.temperature else 0.0
        want = min(int((cumulated <= number * cumulated[-1]).sum()), vocab - 1)
        if token != want:
            differing += 1  # only at the edge between two neighbours or at a threshold
            assert p.temperature > 0 and np.abs(cumulated - number).min() < 1e-4
        if p.logprobs is None:
            assert logprob is None and top == []
            continue
        spoken = rig.logits[row].double().numpy()
        if p.processed_logprobs:
            with np.errstate(divide="ignore"):
                spoken = np.log(probs) if p.temperature else logits
        logprobs = spoken - np.logaddexp.reduce(spoken)
        assert logprob == pytest.approx(logprobs[token], abs=2e-5)
        assert len(top) == p.logprobs
        best = np.argsort(-logprobs, kind="stable")[: p.logprobs]
        for (one, value), other in zip(top, best, strict=True):
            assert value == logprobs[other] or value == pytest.approx(logprobs[other], abs=2e-5)
            assert logprobs[one] == logprobs[other] or abs(logprobs[one] - logprobs[other]) < 2e-5
    assert differing <= count // 100


def test_a_row_is_the_same_alone_and_in_any_batch_bit_for_bit() -> None:
    rig = mixed(40, 2048, seed=1)
    together = rig.sample(list(range(40)))
    for row in range(40):
        assert rig.sample([row]) == [together[row]]
    order = random.Random(2).sample(range(40), 40)
    assert rig.sample(order) == [together[row] for row in order]


def test_ties() -> None:
    """Greedy takes the lowest id; top-k and top-p keep all that tie with the last one kept."""
    params = [SamplingParams(), *(SamplingParams(temperature=1.0, top_k=2, seed=s) for s in range(200))]
    rig = Rig(params, 50, seed=0)
    rig.logits[:] = -20.0
    rig.logits[:, [11, 17, 29]] = 1.0
    tokens = [token for token, *_ in rig.sample(list(range(201)))]
    assert tokens[0] == 11 and set(tokens[1:]) == {11, 17, 29}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
)
def test_draws_are_distributed_as_they_should_be(params: SamplingParams) -> None:
    rig = Rig([replace(params, seed=77)], 40, seed=3)
    _, probs = rig.reference(0)
    counts = np.zeros(40)
    for begin in range(0, 20000, 500):
        rows = SampleRows([0] * 500, list(range(begin + 1, begin + 501)), [0] * 500, {})
        out = rig.sampler.sample(rig.logits.expand(500, -1), rows, rig.history)
        counts += np.bincount(out.token_ids, minlength=40)
    assert counts[probs == 0].sum() == 0
    likely = probs * 20000 >= 5
    chi = ((counts[likely] - 20000 * probs[likely]) ** 2 / (20000 * probs[likely])).sum()
    degrees = likely.sum() - 1
    assert chi < degrees + 4 * math.sqrt(2 * degrees) + 5


def test_a_bad_row_fails_alone() -> None:
    rig = mixed(6, 160, seed=9)
    want = rig.sample(list(range(6)))
    rig.logits[2, 5] = math.nan
    rig.logits[3, 5] = math.inf
    rig.masks[4] = np.zeros(5, dtype=np.uint32)
    have = rig.sample(list(range(6)))
    assert [one[1] for one in have[2:5]] == [RowStatus.NOT_FINITE] * 2 + [RowStatus.NOTHING_ALLOWED]
    assert [have[row] for row in (0, 1, 5)] == [want[row] for row in (0, 1, 5)]


def test_prompt_logprobs() -> None:
    logits = 3 * torch.randn(7, 160, generator=torch.Generator().manual_seed(4))
    tokens = torch.arange(7)
    own, top = prompt_logprobs(logits, tokens, 4)
    want = logits.double().log_softmax(-1)
    assert own == pytest.approx(want.gather(1, tokens[:, None])[:, 0].tolist(), abs=CLOSE)
    assert [[token for token, _ in one] for one in top] == want.topk(4).indices.tolist()


def test_masks_of_a_grammar_engine() -> None:
    """Every token that is sampled under xgrammar's mask is one that its grammar accepts."""
    import xgrammar
    from transformers import AutoTokenizer

    from decodestep.accel.source import DEMO_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    grammar = xgrammar.GrammarCompiler(info).compile_regex(r"[a-z]{3,9} (and|or) [0-9]{2,4}\.")
    rig = Rig([SamplingParams(), SamplingParams(temperature=1.0, seed=5)], info.vocab_size, seed=6)
    for row in range(2):
        matcher = xgrammar.GrammarMatcher(grammar)
        for step in range(40):
            rig.logits.normal_(generator=torch.Generator().manual_seed(100 * row + step))
            mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
            matcher.fill_next_token_bitmask(mask)
            rig.masks = {row: mask.numpy().view(np.uint32)[0]}
            ((token, status, _, _),) = rig.sample([row])
            assert status is RowStatus.OK and matcher.accept_token(token)
            if matcher.is_terminated():
                break
        assert step > 2
