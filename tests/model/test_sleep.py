"""Sleep of a real worker: memory goes, and the same tokens come afterwards. Recordings too."""

import gzip
import json
import weakref

import pytest
import torch
import transformers

from trimaran.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
)
from trimaran.engine.engine_core import EngineCore
from trimaran.errors import CheckpointError, ConflictError
from trimaran.executor.inproc import InprocExecutor
from trimaran.messages import EngineCoreRequest, Profile, Sleep, WakeUp
from trimaran.sampling_params import SamplingParams

VOCABULARY = 97
PROMPT = list(range(3, 40))


def save_model(folder, seed=1, **changes):
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(folder)


class Engine:
    def __init__(self, folder, profile_dir=None, kernels="auto"):
        config = EngineConfig(
            model=ModelConfig(model=str(folder), dtype="float32"),
            cache=CacheConfig(block_size=8, kv_cache_memory_bytes=1 << 20),
            executor=ExecutorConfig(threads=1, kernels=kernels),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            observability=ObservabilityConfig(profile_dir=profile_dir),
        )
        self.executor = InprocExecutor(config)
        self.core = EngineCore(config, self.executor)

    def greedy(self, name="a", prompt=PROMPT, count=12):
        params = SamplingParams(temperature=0.0, max_tokens=count, seed=0)
        self.core.add_request(EngineCoreRequest(name, list(prompt), params))
        return self.steps()[name]

    def steps(self):
        tokens = {}
        while self.core.has_work():
            for message in self.core.step().values():
                for output in message.outputs:
                    tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens

    def do(self, operation):
        done = self.core.control(operation)
        self.steps()
        return done.result(0)


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    return tmp_path / "model"


def weights_in(model):
    """Weak references to the tensors that a model holds, wherever it has them."""
    found, seen, todo = [], set(), [model]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(weakref.ref(thing))
        elif isinstance(thing, list | tuple):
            todo += thing
        elif isinstance(thing, dict):
            todo += thing.values()
        elif type(thing).__module__.startswith("trimaran.model"):
            todo += [getattr(thing, name, None) for name in getattr(thing, "__slots__", ())]
            todo += getattr(thing, "__dict__", {}).values()
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_and_the_same_tokens_come_afterwards(folder, level):
    engine = Engine(folder)
    before = engine.greedy()
    caches = [weakref.ref(cache) for cache in engine.executor.worker.kv_caches]
    weights = weights_in(engine.executor.worker.model)
    assert len(weights) >= 2 * 7
    # A request that a sleep aborts in the middle must leave nothing behind either.
    engine.core.add_request(
        EngineCoreRequest("b", PROMPT, SamplingParams(max_tokens=50, seed=0, temperature=0.0))
    )
    engine.core.step()
    engine.do(Sleep(level, "abort"))
    # No collection of garbage is needed: a served engine's is frozen.
    assert [cache() for cache in caches] == [None] * len(caches)
    gone = [weight() is None for weight in weights]
    assert all(gone) if level == 2 else not any(gone)
    engine.do(WakeUp())
    assert engine.greedy("c") == before
    assert engine.core.stats().prefix_cache_hits == 32, "only the aborted request found any"


def test_a_changed_file_gives_new_weights_and_another_model_is_refused(folder):
    engine = Engine(folder)
    before = engine.greedy()
    engine.do(Sleep(2, "abort"))
    save_model(folder, seed=2)
    engine.do(WakeUp())
    after = engine.greedy("b")
    assert after != before
    assert after == Engine(folder).greedy()
    engine.do(Sleep(2, "abort"))
    save_model(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="another shape"):
        engine.do(WakeUp())
    save_model(folder, seed=2)
    engine.do(WakeUp())
    assert engine.greedy("c") == after


def test_a_wake_up_without_the_file_can_be_tried_again(folder):
    engine = Engine(folder)
    before = engine.greedy()
    engine.do(Sleep(2, "abort"))
    file = folder / "model.safetensors"
    file.rename(folder / "elsewhere")
    with pytest.raises(CheckpointError):
        engine.do(WakeUp())
    assert engine.core.stats().sleep_level == 2
    (folder / "elsewhere").rename(file)
    engine.do(WakeUp())
    assert engine.greedy("b") == before


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_recording_shows_what_the_layers_did(folder, tmp_path, kernels):
    target = tmp_path / "new" / "profiles"
    engine = Engine(folder, str(target), kernels)
    named = engine.do(Profile("start"))
    with pytest.raises(ConflictError, match="recorded already"):
        engine.do(Profile("start"))
    engine.greedy()
    file = engine.do(Profile("stop"))
    assert file == named
    assert [str(path) for path in target.iterdir()] == [file]
    with pytest.raises(ConflictError, match="no profile is being recorded"):
        engine.do(Profile("stop"))
    events = json.loads(gzip.decompress(target.joinpath(file).read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("model/layers/attention.py" in name for name in names)
    assert any("model/layers/mlp.py" in name for name in names)
    assert "aten::argmax" in names or "aten::topk" in names or "aten::max" in names


def test_a_recording_needs_a_folder_and_is_ended_with_the_engine(folder, tmp_path):
    with pytest.raises(ConflictError, match="--profile-dir FOLDER"):
        Engine(folder).do(Profile("start"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConflictError, match=f"--profile-dir {tmp_path}/file"):
        Engine(folder, str(tmp_path / "file")).do(Profile("start"))
    first = Engine(folder, str(tmp_path))
    first.do(Profile("start"))
    first.core.shutdown()
    second = Engine(folder, str(tmp_path))
    second.do(Profile("start"))  # one at a time in a process
    second.do(Sleep(2, "abort"))
    second.do(Profile("stop"))
    second.core.shutdown()
