"""KV groups and the arithmetic of what fits."""

import pytest

from trimaran.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from trimaran.errors import ConfigError
from trimaran.messages import ModelFacts
from trimaran.scheduling.kv_layout import (
    longest_fit,
    make_kv_cache_layout,
    peak_blocks,
    plan_kv_cache,
)


def layers(full, sliding, window=512):
    """``full`` full layers spread evenly among the sliding ones."""
    kinds = [("sliding", window)] * sliding
    for index in range(full):
        kinds.insert((index + 1) * (full + sliding) // full - 1, ("full", 0))
    return kinds


def test_gemma_3_270m_is_cut_as_decided():
    kinds = [("full", 0) if i % 6 == 5 else ("sliding", 512) for i in range(18)]
    layout = make_kv_cache_layout(kinds, block_size=16, bytes_per_layer_token=1024)
    assert [(g.kind, g.window) for g in layout.groups] == [("full", 0)] + [("sliding", 512)] * 5
    assert layout.groups[0].layers == (5, 11, 17)
    assert layout.groups[1].layers == (0, 1, 2)
    assert layout.num_slots == 3
    assert layout.bytes_per_block == 3 * 16 * 1024
    assert layout.place_of_layer(11) == (0, 1)


@pytest.mark.parametrize(
    ("full", "sliding", "size", "groups"),
    [
        (24, 0, 24, 1),
        (0, 24, 24, 1),
        (12, 12, 12, 2),
        (4, 22, 4, 7),  # Gemma 3 1B: two padded slots of 28
        (11, 12, 12, 2),
        (1, 31, 2, 17),
        (2, 7, 1, 9),  # any other size wastes more than a tenth
    ],
)
def test_group_size(full, sliding, size, groups):
    layout = make_kv_cache_layout(layers(full, sliding), block_size=16, bytes_per_layer_token=2)
    assert (layout.num_slots, len(layout.groups)) == (size, groups)
    places = {layout.place_of_layer(layer) for layer in range(full + sliding)}
    assert len(places) == full + sliding
    assert all(slot < size for _, slot in places)


def test_windows_of_different_width_are_different_groups():
    layout = make_kv_cache_layout(
        [("sliding", 8), ("sliding", 16)], block_size=16, bytes_per_layer_token=2
    )
    assert [group.window for group in layout.groups] == [8, 16]


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="layer 0"):
        make_kv_cache_layout([("full", 8)], block_size=16, bytes_per_layer_token=2)
    with pytest.raises(ValueError, match="layer 1"):
        make_kv_cache_layout([("full", 0), ("sliding", 0)], block_size=16, bytes_per_layer_token=2)
    with pytest.raises(ValueError, match="no KV cache"):
        make_kv_cache_layout([], block_size=16, bytes_per_layer_token=2)


def test_peak_blocks_bounds_every_position_of_a_chunk():
    """Against counting: blocks that [first seen token, end of chunk) touches, at its worst."""
    for window in (1, 3, 4, 5, 16):
        layout = make_kv_cache_layout([("sliding", window)], block_size=4, bytes_per_layer_token=1)
        for chunk in (1, 2, 4, 7):
            for length in (1, 5, 30):
                worst = 0
                for start in range(length):
                    end = min(start + chunk, length)
                    first = max(0, start - window + 1)
                    worst = max(worst, (end - 1) // 4 - first // 4 + 1)
                bound = peak_blocks(layout, length, chunk)
                assert worst <= bound <= worst + 1, (window, chunk, length)


def test_longest_fit_is_the_longest():
    layout = make_kv_cache_layout(layers(1, 5, 8), block_size=4, bytes_per_layer_token=1)
    for num_blocks in range(1, 80):
        length = longest_fit(layout, num_blocks, 16, 100)
        assert length == 0 or peak_blocks(layout, length, 16) <= num_blocks - 1
        assert length == 100 or peak_blocks(layout, length + 1, 16) > num_blocks - 1


# ------------------------------------------------------------------------------- size of the cache


def facts(available=1 << 20, max_model_len=1024):
    # One full group: a block is 16 tokens x 4 layers x 16 bytes = 1 KiB.
    layout = make_kv_cache_layout([("full", 0)] * 4, block_size=16, bytes_per_layer_token=16)
    return ModelFacts(
        layout=layout, vocab_size=100, max_model_len=max_model_len, dtype="float32",
        weight_bytes=1, available_kv_bytes=available, num_threads=1, kernels="none",
    )  # fmt: skip


def config(max_model_len=None, kv_bytes=None, max_num_seqs=4):
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(kv_cache_memory_bytes=kv_bytes),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


def test_cache_is_what_could_be_used_at_most():
    # 4 sequences x 1024 tokens = 256 blocks, and the null block.
    kv, length = plan_kv_cache(facts(available=1 << 30), config())
    assert (kv.num_blocks, length) == (257, 1024)


def test_cache_takes_half_of_free_memory_at_most():
    kv, length = plan_kv_cache(facts(available=200 << 10), config())
    shared, _ = plan_kv_cache(facts(available=400 << 10), config(), num_engines_on_host=2)
    assert shared == kv
    assert (kv.num_blocks, length) == (100, 1024)


def test_open_length_is_fitted():
    kv, length = plan_kv_cache(facts(available=41 << 10), config())
    assert (kv.num_blocks, length) == (20, 19 * 16)


def test_explicit_bytes_win_over_the_fraction():
    kv, _ = plan_kv_cache(facts(available=64 << 10), config(kv_bytes=300 << 10))
    assert kv.num_blocks == 300


def test_given_length_that_does_not_fit_says_what_would():
    with pytest.raises(ConfigError) as caught:
        plan_kv_cache(facts(available=41 << 10), config(max_model_len=640))
    text = str(caught.value)
    # 40 blocks and the null block are needed, 20 are there: 19 of use.
    for part in ("640", "--max-model-len 304", f"--kv-cache-memory-bytes {41 << 10}", "fraction"):
        assert part in text
    kv, length = plan_kv_cache(facts(), config(max_model_len=640, kv_bytes=41 << 10))
    assert (kv.num_blocks, length) == (41, 640)


def test_given_bytes_that_hold_nothing_are_refused():
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        plan_kv_cache(facts(), config(kv_bytes=1024))


def test_length_over_the_models_own_is_refused():
    with pytest.raises(ConfigError, match=r"--max-model-len 2000.*1024"):
        plan_kv_cache(facts(), config(max_model_len=2000))
