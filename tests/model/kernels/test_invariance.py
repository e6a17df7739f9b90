"""A row's result is the row's own, bit for bit: whatever shares its batch, chunk and threads."""

import pytest
import torch
from tests.model.kernels.scenario import Paged, Shape, make_metadata, make_paged

SHAPES = [
    Shape(dtype=torch.bfloat16),
    Shape(dtype=torch.float32),
    Shape(heads=6, kv_heads=2, head_dim=48, block_size=24, window=300, dtype=torch.bfloat16),
    Shape(heads=8, kv_heads=8, head_dim=64, block_size=8, window=70, dtype=torch.float32),
]


def attend(native, paged: Paged, requests: list[int], first: dict[int, int], last: dict[int, int]):
    """Rows first[r]:last[r] of the named requests as one batch; {request: rows}."""
    starts = torch.tensor([0] + [n for n, _ in paged.lengths]).cumsum(0).tolist()
    lengths, rows = [], []
    for r in requests:
        tokens, context = paged.lengths[r]
        lengths.append((last[r] - first[r], context - tokens + last[r]))
        rows.append(paged.q[starts[r] + first[r] : starts[r] + last[r]])
    table = paged.metadata.block_table[requests].contiguous()
    metadata = make_metadata(lengths, table, paged.shape.block_size, paged.shape.window)
    out = native.paged_attention(torch.cat(rows), paged.cache, metadata, paged.scale)
    return dict(zip(requests, out.split([n for n, _ in lengths]), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(native, shape):
    # The last token of each request is written, and those before are steps of one long prefill.
    paged = make_paged(shape, [(90, 90), (1, 2000), (40, 700), (130, 530), (1, 33)])
    everyone = list(range(5))
    begin = dict.fromkeys(everyone, 0)
    end = {r: paged.lengths[r][0] for r in everyone}
    whole = attend(native, paged, everyone, begin, end)
    torch.set_num_threads(1)
    alone = attend(native, paged, everyone, begin, end)
    for r in everyone:
        assert torch.equal(alone[r], whole[r]), f"request {r}: one thread"
    torch.set_num_threads(2)
    for r in everyone:
        assert torch.equal(attend(native, paged, [r], begin, end)[r], whole[r]), f"{r} alone"
        for cut in {1, 7, 16, 64, end[r] - 1} & set(range(1, end[r])):
            head = attend(native, paged, [r, 1], begin, end | {r: cut})[r]
            tail = attend(native, paged, [4, r], begin | {r: cut}, end)[r]
            assert torch.equal(torch.cat((head, tail)), whole[r]), f"request {r} cut at {cut}"
        row = end[r] // 2
        single = attend(native, paged, [r], {r: row}, {r: row + 1})[r]
        assert torch.equal(single[0], whole[r][row]), f"request {r}: row {row} as a decode step"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_the_small_operations(native, dtype):
    tokens, width = 130, 640
    x = torch.randn(tokens, width).to(dtype)
    residual = torch.randn(tokens, width)
    weight, post = torch.randn(width), torch.randn(width)

    def run(rows: slice) -> list[torch.Tensor]:
        part, stream, onto = x[rows], residual[rows].clone(), residual[rows].clone()
        return [
            native.rms_norm(part, weight, 1e-6),
            native.add_rms_norm(part, stream, weight, 1e-6),
            native.norm_add_rms_norm(part, onto, post, weight, 1e-6),
            native.activation_mul(part, "silu"),
            native.activation_mul(part, "gelu_tanh"),
            stream,
            onto,
        ]

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(129, 130), slice(5, 40)):
        for part, all_rows in zip(run(rows), whole, strict=True):
            assert torch.equal(part, all_rows[rows])
    torch.set_num_threads(1)
    for single, double in zip(run(slice(None)), whole, strict=True):
        assert torch.equal(single, double)
