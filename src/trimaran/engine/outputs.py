"""Outputs beside the ordinary ones: merged for a reader that lags, failed for a refused request.

Owns: how deltas of one request join. Called by the engine's output thread (a front end that does
not read as fast as the engine writes) and by the client (a consumer that does not take as fast as
the link brings); both then hold at most what the running requests can still produce.
"""

from collections.abc import Mapping, MutableSequence

from trimaran.errors import TrimaranError
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)


def failed_output(request: EngineCoreRequest, error: TrimaranError) -> EngineCoreOutput:
    """The only output of a request that the engine does not take."""
    return EngineCoreOutput(
        request_id=request.request_id,
        first_index=len(request.prior_output_ids),
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=str(error),
    )


def append_or_merge(backlog: MutableSequence[EngineCoreOutputs], later: EngineCoreOutputs) -> None:
    """Add to a backlog; joined to its last message where both are plain outputs of one engine.

    Outputs that do not follow one another (a resend, a gap) stay apart: their reader judges them.
    """
    if backlog:
        last = backlog[-1]
        same_engine = (last.rank, last.incarnation) == (later.rank, later.incarnation)
        if same_engine and last.utility is None and later.utility is None:
            known = {output.request_id: output for output in last.outputs}
            if all(_follows(output, known.get(output.request_id)) for output in later.outputs):
                _merge_outputs(last, known, later)
                return
    backlog.append(later)


def _follows(later: EngineCoreOutput, earlier: EngineCoreOutput | None) -> bool:
    return earlier is None or (
        earlier.finish_reason is None
        and later.first_index == earlier.first_index + len(earlier.new_token_ids)
    )


def _merge_outputs(
    earlier: EngineCoreOutputs, known: Mapping[str, EngineCoreOutput], later: EngineCoreOutputs
) -> None:
    for output in later.outputs:
        if output.request_id in known:
            _merge_output(known[output.request_id], output)
        else:
            earlier.outputs.append(output)
    if later.stats is not None:
        earlier.stats = later.stats
    earlier.timestamp = later.timestamp


def _merge_output(earlier: EngineCoreOutput, later: EngineCoreOutput) -> None:
    # New lists: the step that made the old ones may still hold them.
    earlier.new_token_ids = earlier.new_token_ids + later.new_token_ids
    earlier.logprobs = _joined(earlier.logprobs, later.logprobs)
    earlier.prompt_logprobs = _joined(earlier.prompt_logprobs, later.prompt_logprobs)
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
    earlier.error = later.error
    earlier.num_cached_tokens = max(earlier.num_cached_tokens, later.num_cached_tokens)
    earlier.queued_at = earlier.queued_at or later.queued_at
    earlier.scheduled_at = earlier.scheduled_at or later.scheduled_at
    earlier.first_token_at = earlier.first_token_at or later.first_token_at
    earlier.num_preemptions = max(earlier.num_preemptions, later.num_preemptions)


def _joined(earlier: TokenLogprobs | None, later: TokenLogprobs | None) -> TokenLogprobs | None:
    if earlier is None or later is None:
        return earlier or later
    return TokenLogprobs(
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        ranks=earlier.ranks + later.ranks,
    )
