"""The whole engine on real arithmetic: scheduler, KV cache, worker, model, sampler.

Against transformers (full recomputation, no cache of its own) on tiny random checkpoints; and the
promise of --batch-invariant: not a bit of a request's output depends on company, chunking, caching
or preemption. KV tensors are poisoned with NaN first, so that reading what was never written shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from trimaran.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from trimaran.engine.engine_core import EngineCore
from trimaran.errors import ConfigError
from trimaran.executor.inproc import InprocExecutor
from trimaran.messages import EngineCoreRequest, FinishReason, ResetPrefixCache, TokenLogprobs
from trimaran.sampling_params import SamplingParams
from trimaran.scheduling.kv_layout import peak_blocks

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    # Sums this long round otherwise for one row than for several, unless rows come in blocks.
    "intermediate_size": 1200,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
WINDOW = 24  # shorter than most prompts
OUTPUT = 16
SMALL_LENGTH, SMALL_BUDGET = 112, 64  # tokens, with the small pool


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: transformers.PreTrainedModel

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """The most likely continuation, and log-probabilities after every token but the last."""
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                logits = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
                tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :], logits.log_softmax(-1)


@pytest.fixture(scope="module", params=["llama", "gemma"])
def model(request, tmp_path_factory) -> Model:
    if request.param == "llama":
        config = transformers.LlamaConfig(**COMMON, tie_word_embeddings=False)
        reference = transformers.LlamaForCausalLM(config)
    else:
        kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(
            **COMMON,
            tie_word_embeddings=False,  # a tied head would say each token again
            sliding_window=WINDOW,
            layer_types=kinds,
            query_pre_attn_scalar=32,
        )
        reference = transformers.Gemma3ForCausalLM(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if "norm" in name and request.param == "llama":
                parameter.add_(1.0)
    folder = tmp_path_factory.mktemp(request.param)
    reference.eval().save_pretrained(folder)
    return Model(folder, reference)


class Engine:
    def __init__(
        self,
        model: Model,
        *,
        dtype: str = "float32",
        budget: int = 256,
        kv_bytes: int = 64 << 20,
        max_model_len: int = 256,
        batch_invariant: bool = False,
        threads: int = 1,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=str(model.folder),
                dtype=dtype,
                max_model_len=max_model_len,
                batch_invariant=batch_invariant,
            ),
            cache=CacheConfig(block_size=8, kv_cache_memory_bytes=kv_bytes),
            executor=ExecutorConfig(threads=threads),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=budget),
        )
        executor = InprocExecutor(config)
        self.core = EngineCore(config, executor)
        with torch.inference_mode():
            for cache in executor.worker.kv_caches:
                cache.fill_(float("nan"))

    def run(self, requests: Sequence[EngineCoreRequest]) -> dict[str, "Result"]:
        results = {request.request_id: Result() for request in requests}
        for request in requests:
            self.core.add_request(request)
        while self.core.has_work():
            for message in self.core.step().values():
                for output in message.outputs:
                    results[output.request_id].add(output)
        return results


class Result:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[list[float]] = []
        self.prompt_logprobs: TokenLogprobs | None = None
        self.num_cached = 0

    def add(self, output) -> None:
        assert output.first_index == len(self.tokens)
        self.tokens += output.new_token_ids
        self.logprobs += output.logprobs.logprobs if output.logprobs else []
        self.num_cached += output.num_cached_tokens
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        assert output.finish_reason in (None, FinishReason.LENGTH)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def request(name: str, tokens: Sequence[int], output: int = OUTPUT, **params) -> EngineCoreRequest:
    params = {"seed": 0, "temperature": 0.0, "max_tokens": output, "logprobs": 2} | params
    return EngineCoreRequest(name, list(tokens), SamplingParams(**params))


LENGTHS = [1, 8, 33, 64, 90]


@pytest.fixture(scope="module")
def expected(model) -> dict[int, list[int]]:
    return {length: model.greedy(prompt(length), OUTPUT)[0] for length in LENGTHS}


def run_all(engine: Engine) -> dict[str, Result]:
    return engine.run([request(str(length), prompt(length)) for length in LENGTHS])


def tokens_of(results: dict[str, Result]) -> dict[int, list[int]]:
    return {int(name): result.tokens for name, result in results.items()}


def test_greedy_as_transformers(model, expected):
    assert tokens_of(run_all(Engine(model))) == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 20


def test_in_chunks(model, expected):
    """A budget of 11 tokens: prompts come in pieces that no block border fits."""
    assert tokens_of(run_all(Engine(model, budget=11))) == expected


def test_cached_prefixes(model, expected):
    engine = Engine(model)
    run_all(engine)
    again = run_all(engine)
    assert tokens_of(again) == expected
    # All whole blocks but that of the last token (trap T-L8).
    assert {int(k): r.num_cached for k, r in again.items()} == {1: 0, 8: 0, 33: 32, 64: 56, 90: 88}


def test_preempted(model):
    """The pool holds one sequence of full length; four that start together outgrow it."""
    lengths, output = (9, 17, 25, 33), 40
    engine = small_engine(model)
    results = engine.run([request(str(n), prompt(n), output) for n in lengths])
    assert tokens_of(results) == {n: model.greedy(prompt(n), output)[0] for n in lengths}
    assert engine.core.stats().num_preemptions > 0


def small_engine(model: Model, **settings) -> Engine:
    layout = Engine(model, **settings).core.facts.layout
    blocks = 1 + peak_blocks(layout, SMALL_LENGTH, SMALL_BUDGET)
    return Engine(
        model,
        kv_bytes=blocks * layout.bytes_per_block,
        max_model_len=SMALL_LENGTH,
        budget=SMALL_BUDGET,
        **settings,
    )


@pytest.mark.parametrize("budget", [256, 13])
def test_log_probabilities_as_transformers(model, budget):
    tokens = prompt(50)
    output, reference = model.greedy(tokens, 10)
    result = Engine(model, budget=budget).run(
        [request("a", tokens, 10, logprobs=0, prompt_logprobs=3), request("b", prompt(40))]
    )["a"]
    assert result.tokens == output
    whole = tokens + output
    got_prompt = [row[0] for row in result.prompt_logprobs.logprobs]
    got = torch.tensor(got_prompt + [row[0] for row in result.logprobs])
    chosen = reference[torch.arange(len(whole) - 1), torch.tensor(whole[1:])]
    torch.testing.assert_close(got, chosen, atol=1e-4, rtol=0)
    assert [row[0] for row in result.prompt_logprobs.token_ids] == tokens[1:]
    best = reference[: len(tokens) - 1].topk(3).indices.tolist()
    assert [row[1:] for row in result.prompt_logprobs.token_ids] == best


@pytest.mark.parametrize(("dtype", "threads"), [("bfloat16", 2), ("float32", 1)])
def test_batch_invariant(model, dtype, threads):
    """Traps T-D6, T-L2, T-L12: tokens and log-probabilities, bit for bit."""
    settings = {"dtype": dtype, "batch_invariant": True, "threads": threads}
    watched = [
        request("greedy", prompt(60)),
        request("seeded", prompt(37, 1), temperature=1.0, seed=11),
        request("nucleus", prompt(60), temperature=1.3, top_p=0.9, seed=11, presence_penalty=0.5),
    ]
    others = [
        request(f"other {i}", prompt(5 * i + 1, 2), 8, temperature=i % 3 / 2, seed=i)
        for i in range(16)
    ]
    engine = Engine(model, **settings)
    alone = {}
    for each in watched:
        alone |= engine.run([each])
        engine.core.control(ResetPrefixCache())
    assert len(set(alone["seeded"].tokens)) > 3
    small = small_engine(model, **settings)
    runs = {
        "beside others": engine.run([*others, *watched]),
        "cached": engine.run(watched),
        "in chunks": Engine(model, budget=11, **settings).run([*watched, *others]),
        "preempted": small.run([*others[:6], *watched, *others[6:]]),
    }
    assert runs["cached"]["greedy"].num_cached > 0
    assert small.core.stats().num_preemptions > 0
    for what, results in runs.items():
        for name, result in alone.items():
            assert results[name].tokens == result.tokens, (what, name)
            assert results[name].logprobs == result.logprobs, (what, name)


def test_batch_invariant_is_refused_where_it_would_not_hold(model):
    config = EngineConfig(
        model=ModelConfig(model=str(model.folder), batch_invariant=True),
        executor=ExecutorConfig(kernels="torch", threads=1),
    )
    with pytest.raises(ConfigError, match="--batch-invariant needs the compiled kernels"):
        EngineCore(config, InprocExecutor(config))
