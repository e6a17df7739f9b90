"""A stream of a request that was cut: its text, its stop strings and its usage go on."""

import pytest

from trimaran.client.output_processor import OutputProcessor, RequestStream
from trimaran.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from trimaran.sampling_params import RequestOutputKind, SamplingParams

TEXT = "alpha bêta 🜚 gamma delta"


def resumed(tokenizer, prior, **params):
    params = SamplingParams(**params)
    request = EngineCoreRequest("a", [5, 6], params, prior_output_ids=list(prior))
    processor = OutputProcessor(tokenizer)
    stream = RequestStream("a", None, [request], params, lambda: None)
    processor.add(stream)
    return processor, stream


def feed(processor, tokens, first, reason=FinishReason.LENGTH):
    """One token at a time, then the end; the ids that the engine is to abort."""
    aborted = []
    for index, token in enumerate(tokens, first):
        output = EngineCoreOutput("a", index, [token])
        aborted += processor.process(EngineCoreOutputs(0, 1, [output]))
    output = EngineCoreOutput("a", first + len(tokens), [], reason)
    return aborted + processor.process(EngineCoreOutputs(0, 1, [output]))


def items(stream):
    found = []
    while (item := stream.take()) is not None:
        found.append(item)
        if item.finished:
            break
    return found


@pytest.fixture
def ids(tokenizer):
    return tokenizer.encode(TEXT, add_special_tokens=False)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_wherever_it_is_cut(tokenizer, ids, kind):
    texts = []
    for cut in range(len(ids) + 1):
        processor, stream = resumed(tokenizer, ids[:cut], output_kind=kind)
        feed(processor, ids[cut:], cut)
        found = items(stream)
        output = found[-1].outputs[0]
        assert found[-1].num_generated_tokens == len(ids)
        assert output.finish_reason == "length"
        texts.append(output.text)
        if kind is RequestOutputKind.DELTA:
            assert output.token_ids == ids[cut:]
            assert TEXT.endswith(output.text)
        else:
            assert (output.text, output.token_ids) == (TEXT, ids)
    # What was shown before the cut is not shown again; half a character is not lost.
    lengths = [len(text) for text in texts]
    assert lengths == sorted(lengths, reverse=True)
    assert (texts[0], lengths[-1] == 0) == (TEXT, kind is RequestOutputKind.DELTA)


def test_a_stop_string_across_the_cut(tokenizer, ids):
    expected = None
    for cut in range(len(ids)):
        processor, stream = resumed(tokenizer, ids[:cut], stop=("ma del",))
        aborted = feed(processor, ids[cut:], cut)
        (item,) = items(stream)
        output = item.outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == (
            "alpha bêta 🜚 gam",
            "stop",
            "ma del",
        )
        assert aborted == ["a"]
        # Nothing behind the token that completes it counts, also where that came before the cut.
        expected = expected or item.num_generated_tokens
        assert item.num_generated_tokens == expected


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer, ids):
    for cut in range(len(ids)):
        processor, stream = resumed(tokenizer, ids[:cut], stop=("alpha",), min_tokens=len(ids))
        feed(processor, ids[cut:], cut)
        (item,) = items(stream)
        assert item.outputs[0].text == TEXT
