"""What requests do to logits: against transformers' processors and plain loops."""

import numpy as np
import torch
from tests.model.sampling.harness import Sequences, request, sample
from transformers import RepetitionPenaltyLogitsProcessor

from trimaran.ipc.codec import Buffer
from trimaran.messages import Tensor

WIDTH = 300


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 4


def test_repetition_penalty_over_prompt_and_output():
    logits = some_logits(2)
    tokens = [[5, 9, 5, 200], [7, 8, 9, 9]]
    requests = [request(each[:2], each[2:], repetition_penalty=1.7) for each in tokens]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(tokens), logits.clone())
    got = Sequences(requests, WIDTH).changed(logits)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_placeholders_of_embeddings_are_no_tokens_to_a_penalty():
    logits = some_logits(1)
    embeds = request([0, 0], [9, 9], repetition_penalty=1.7)
    embeds.prompt_embeds = Tensor("float32", (2, 1), Buffer(bytes(8)))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[9, 9]]), logits.clone())
    got = Sequences([embeds], WIDTH).changed(logits)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def penalised(row, prompt, output, repetition, frequency, presence):
    """The definition, token by token."""
    row = row.copy()
    for token in range(len(row)):
        if token in prompt or token in output:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        count = output.count(token)
        row[token] -= frequency * count + presence * (count > 0)
    return row


def test_penalties_follow_the_output_step_by_step():
    """Counts are kept incrementally; 150 tokens make their arrays grow, some rows use none."""
    kinds = [(1.3, 0.5, -0.25), (1.0, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, 1.5), (0.5, 0.0, 0.0)]
    prompts = [[1, 2, 2], [4], [5, 6], [7], [8, 9]]
    requests = [
        request(
            prompt,
            [3, 3],
            temperature=0.0,
            repetition_penalty=r,
            frequency_penalty=f,
            presence_penalty=p,
        )
        for prompt, (r, f, p) in zip(prompts, kinds, strict=True)
    ]
    sequences = Sequences(requests, WIDTH)
    outputs = [[3, 3] for _ in prompts]
    for step in range(150):
        logits = some_logits(len(prompts), step)
        expected = np.stack(
            [
                penalised(row, prompt, output, *kind)
                for row, prompt, output, kind in zip(
                    logits.numpy(), prompts, outputs, kinds, strict=True
                )
            ]
        )
        np.testing.assert_allclose(sequences.changed(logits).numpy(), expected, rtol=1e-5)
        tokens = sequences.step(logits).token_ids.tolist()
        assert tokens == expected.argmax(-1).tolist()
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)


def test_a_resumed_sequence_has_the_counts_of_an_undisturbed_one():
    settings = {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
    sequences = Sequences([request([1, 2], **settings)], WIDTH)
    output = [int(sequences.step(some_logits(1, step)).token_ids[0]) for step in range(20)]
    logits = some_logits(1, 99)
    resumed = Sequences([request([1, 2], output, **settings)], WIDTH)
    assert torch.equal(resumed.changed(logits), sequences.changed(logits))


def test_a_row_left_is_a_row_without_settings():
    sequences = Sequences(
        [
            request(
                logit_bias={3: 50.0},
                presence_penalty=1.0,
                allowed_token_ids=(1,),
                min_tokens=5,
                eos=[2],
                bad_words=[[9]],
            )
        ],
        WIDTH,
    )
    logits = some_logits(1)
    assert not torch.equal(sequences.changed(logits), logits)
    sequences.batch.leave(0)
    assert torch.equal(sequences.changed(logits), logits)


def test_logit_bias_decides_greedy_and_ignores_foreign_ids():
    logits = some_logits(2)
    first, second = logits[0].topk(2).indices.tolist()
    requests = [
        request(temperature=0.0, logit_bias={first: -100.0, 10_000: 100.0}),
        request(temperature=0.0, logit_bias={17: 100.0}),
    ]
    assert sample(requests, logits) == [second, 17]


def test_allowed_token_ids():
    logits = some_logits(3)
    allowed = (7, 200, 250)
    best = max(allowed, key=lambda token: float(logits[0, token]))
    requests = [request(temperature=0.0, allowed_token_ids=allowed)] + [
        request(temperature=50.0, seed=seed, allowed_token_ids=allowed) for seed in (1, 2)
    ]
    tokens = sample(requests, logits)
    assert tokens[0] == best
    assert set(tokens) <= set(allowed)


def test_min_tokens_holds_every_end_back_for_exactly_that_long():
    """Traps T-A6 and T-A7: 8 other tokens, then the forced end; 1 for min_tokens 0."""
    for min_tokens in (0, 1, 8):
        sequences = Sequences(
            [
                request(
                    temperature=0.0,
                    min_tokens=min_tokens,
                    logit_bias={106: 100.0, 50: 90.0},
                    stop_token_ids=(50,),
                    eos=[1, 106, 10**6],
                )
            ],
            WIDTH,
        )
        tokens = [
            int(sequences.step(some_logits(1, step)).token_ids[0]) for step in range(min_tokens + 1)
        ]
        assert tokens[-1] == 106
        assert not {1, 50, 106} & set(tokens[:-1])


def test_min_tokens_counts_what_was_put_out_before_a_preemption():
    resumed = request(
        [1, 2], [9] * 3, temperature=0.0, min_tokens=3, logit_bias={0: 100.0}, eos=[0]
    )
    early = request([1, 2], [9] * 2, temperature=0.0, min_tokens=3, logit_bias={0: 100.0}, eos=[0])
    tokens = sample([resumed, early], some_logits(2))
    assert tokens[0] == 0
    assert tokens[1] != 0


def test_with_ignore_eos_the_end_is_a_token_like_others():
    forced = request(temperature=0.0, min_tokens=4, ignore_eos=True, logit_bias={0: 100.0}, eos=[0])
    assert sample([forced], some_logits(1)) == [0]


def test_nothing_but_ends_allowed_before_min_tokens_gives_an_end():
    only_ends = {"allowed_token_ids": (4, 5), "min_tokens": 3, "stop_token_ids": (4, 5)}
    requests = [request(temperature=t, seed=s, **only_ends) for t, s in ((0.0, 0), (1.0, 1))]
    assert set(sample(requests, some_logits(2))) <= {4, 5}


def test_bad_words_of_one_and_of_several_tokens():
    """Trap T-G14: the last token of a word is banned after its beginning, and only then."""
    words = [[20], [30, 31, 32], [31, 33], [500]]
    bias = {20: 100.0, 32: 75.0, 33: 50.0, 34: 25.0}
    cases = [
        ([1, 2], [], 32),  # 20 is banned everywhere
        ([1, 30], [31], 34),  # 32 and 33 would complete words, one begun in the prompt
        ([1], [29, 31], 32),
        ([31], [], 32),  # shorter than the word's beginning
    ]
    requests = [
        request(prompt, output, temperature=0.0, logit_bias=bias, bad_words=words)
        for prompt, output, _ in cases
    ]
    assert sample(requests, some_logits(len(cases))) == [expected for *_, expected in cases]


def test_ids_beyond_the_tokenizer_never_come():
    """Trap T-E5, at a temperature that flattens everything."""
    requests = [request(seed=seed, temperature=100.0) for seed in range(64)]
    logits = torch.zeros(64, WIDTH)
    logits[:, 250:] = 1000.0
    sequences = Sequences(requests, WIDTH, known=250)
    assert sequences.step(logits).token_ids.max() < 250
