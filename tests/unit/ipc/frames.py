"""Frames that nobody in his right mind sends: strategies for hypothesis."""

import msgspec
from hypothesis import strategies as st

from trimaran.ipc.codec import Buffer, Encoder
from trimaran.messages import (
    AbortRequests,
    ApiServerReady,
    DeploymentState,
    EngineAddresses,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineDeath,
    EngineHello,
    EngineInit,
    EngineProgress,
    FinishReason,
    HandshakeRefusal,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheLayout,
    ModelFacts,
    ModelRunnerOutput,
    NewRequestData,
    Ping,
    Profile,
    ResetPrefixCache,
    SchedulerOutput,
    SchedulerStats,
    Sleep,
    Tensor,
    TokenLogprobs,
    UtilityCall,
    UtilityOutput,
    WakeUp,
)
from trimaran.sampling_params import SamplingParams

PARAMS = SamplingParams(
    n=2, temperature=0.7, seed=3, max_tokens=9, stop=("x",), stop_token_ids=(5,),
    logit_bias={7: 1.5}, allowed_token_ids=(1, 2), bad_words=("y",), logprobs=2,
)  # fmt: skip
EMBEDS = Tensor("float32", (2, 3), Buffer(bytes(24)))
BIG_EMBEDS = Tensor("bfloat16", (2, 20_000), Buffer(bytes(80_000)))
LAYOUT = KVCacheLayout(16, (KVCacheGroup("full", 0, (0, 1)),), 2, 1024)
COLUMNS = TokenLogprobs([[5, 6]], [[-0.5, -1.0]], [1])

# At least one of every kind that crosses a process, its optional fields filled.
MESSAGES = [
    EngineCoreRequest(
        "a", [1, 2], PARAMS, [3], 1, 1, 5, 2.5, [4], [[8, 9]], "salt", "cmpl-1", EMBEDS
    ),
    EngineCoreRequest("a", [1, 2], PARAMS, prompt_embeds=BIG_EMBEDS),
    AbortRequests(["a", "b"]),
    *[
        UtilityCall(1, 0, operation)
        for operation in (
            Ping(), ResetPrefixCache(), Sleep(2, "wait"), WakeUp(), Profile("start"),
        )
    ],
    EngineCoreOutputs(
        1,
        99,
        [EngineCoreOutput("a", 4, [5], FinishReason.STOP, 5, COLUMNS, COLUMNS, 3, "why", 1.0, 2.0)],
        SchedulerStats(1, 2, 3, 0.5),
        UtilityOutput(1, b"\xc3", "error", "ValueError"),
        3.5,
    ),
    EngineDeath(0, 1, "cause"),
    EngineHello(2, 0, 1, 77, "model=m"),
    EngineInit(EngineAddresses(["ipc:///a"], ["ipc:///b"])),
    HandshakeRefusal("no"),
    EngineProgress(0, 1, "loading", 50.0, "half"),
    EngineCoreReadyResponse(
        0, 1, 10, 16, 100, 50, "float32", 1, 1, 1, "mock", [("loading", 1.0)], 1
    ),
    DeploymentState(False, "loading", 5.0, "failure", "/model"),
    ApiServerReady([("spawned", 1.0)]),
    KVCacheConfig(LAYOUT, 10),
    ModelFacts(LAYOUT, 50, 100, "float32", 1, 2, 1, "mock", 8),
    SchedulerOutput(
        1, ["b"], [NewRequestData("a", [1], 1, PARAMS, [], [[1]], 0, [[5]], EMBEDS)],
        ["a"], [0], [1], [None], 1,
    ),
    ModelRunnerOutput([[5]], [COLUMNS], {"a": COLUMNS}, {"b": "why"}),
]  # fmt: skip

# What integers, lengths and nesting can do at worst, as msgpack.
BOMBS = [
    b"",
    b"\xc1",
    b"\x91" * 100_000,
    b"\x81\xa1a" * 50_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x92\xa1a\xdd\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xa2\xff\xfe",
    b"\x91\xc7\x0c\xff" + b"\xff" * 12,
]

# Values in the place of any field.
WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, 1e308]),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just([]),
    st.just([[[[[]]]]]),
    st.just({}),
    st.just(msgspec.msgpack.Ext(3, b"x")),
)


def frames_of(message):
    return [bytes(frame) for frame in Encoder().encode_frames(message)]


@st.composite
def damaged(draw, payload):
    """Some bytes changed, or cut off, or added."""
    frame = bytearray(payload)
    for _ in range(draw(st.integers(0, 4))):
        if frame:
            frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))]) + draw(st.binary(max_size=2))


@st.composite
def with_a_wild_field(draw, payload):
    """Well-formed msgpack whose shape is right but for one place."""
    tree = msgspec.msgpack.decode(payload)
    node = tree
    while isinstance(node, list) and node:
        place = draw(st.integers(0, len(node) - 1))
        if not isinstance(node[place], list) or not node[place] or draw(st.booleans()):
            node[place] = draw(WILD)
            break
        node = node[place]
    return msgspec.msgpack.encode(tree)


def damaged_frames():
    """One frame: random, a bomb, or a message of any kind with something wrong in it."""
    payloads = st.sampled_from([frames_of(message)[0] for message in MESSAGES])
    return st.one_of(
        st.binary(max_size=40),
        st.sampled_from(BOMBS),
        payloads,
        payloads.flatmap(damaged),
        payloads.flatmap(with_a_wild_field),
    )
