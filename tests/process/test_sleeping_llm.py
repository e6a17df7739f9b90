"""Sleep as users meet it: LLM with and without an engine process, and AsyncLLM."""

import asyncio

import pytest

from trimaran.bench.tiny_model import write_tiny_model
from trimaran.client.async_llm import AsyncLLM
from trimaran.client.llm import LLM
from trimaran.config import EngineConfig, ExecutorConfig, ModelConfig
from trimaran.errors import ConflictError, InvalidRequestError
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 20.0
FOREVER = 30_000
# The mock's tokens are those of another vocabulary.
PARAMS = SamplingParams(max_tokens=5, seed=0, detokenize=False)
LONG = SamplingParams(max_tokens=FOREVER, seed=0, detokenize=False)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("multiprocess", [True, False])
def test_llm(model, multiprocess):
    settings = {"distributed_executor_backend": "mock", "max_model_len": 32_768}
    with LLM(model, multiprocess=multiprocess, **settings) as llm:
        before = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        assert len(before) == 5
        llm.engine.add_request("long", PROMPT, LONG)
        llm.sleep()
        assert llm.engine.is_sleeping()
        last = []
        while llm.engine.has_unfinished_requests():
            last += llm.engine.step()
        assert last[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(ConflictError, match=r"sleeps \(wake_up\(\) first\)"):
            llm.generate(PROMPT, PARAMS)
        llm.sleep(level=2)
        llm.wake_up()
        assert not llm.engine.is_sleeping()
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == before
        with pytest.raises(InvalidRequestError, match="level must be"):
            llm.sleep(level=3)
        for profile in (llm.start_profile, llm.stop_profile):
            with pytest.raises(ConflictError, match="computes nothing"):
                profile()


async def first_of(stream):
    return await anext(stream)


async def last_of(stream):
    async for item in stream:
        last = item
    return last


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)  # the engine announces it in its own time


async def use_async_llm(model):
    config = EngineConfig(
        model=ModelConfig(model=model, max_model_len=32_768),
        executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=0.001),
    )
    async with await AsyncLLM.create(config) as llm:
        assert llm.sleep_phase is None
        running = llm.generate(PROMPT, LONG)
        await first_of(running)
        waits = asyncio.create_task(llm.sleep(1, "wait"))
        await until(lambda: llm.sleep_phase == "falling asleep")
        assert not await llm.is_sleeping()
        held = asyncio.create_task(last_of(llm.generate(PROMPT, PARAMS)))
        await llm.sleep(2)
        # Known before the answer, so that /ready never contradicts it.
        assert llm.sleep_phase == "sleeping"
        assert await llm.is_sleeping()
        await waits
        assert (await last_of(running)).outputs[0].finish_reason == "abort"
        assert not held.done()
        await llm.wake_up()
        assert llm.sleep_phase is None
        assert (await held).outputs[0].finish_reason == "length"
        running = llm.generate(PROMPT, LONG)
        await first_of(running)
        waits = asyncio.create_task(llm.sleep(0, "wait"))
        await until(lambda: llm.sleep_phase == "falling asleep")
        await llm.wake_up()
        with pytest.raises(ConflictError, match="wake_up came before"):
            await waits
        await running.aclose()
        for profile in (llm.start_profile, llm.stop_profile):
            with pytest.raises(ConflictError, match="computes nothing"):
                await profile()


def test_async_llm(model):
    asyncio.run(asyncio.wait_for(use_async_llm(model), TIMEOUT_S))
