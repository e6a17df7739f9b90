"""What a request must be before the scheduler sees it.

Owns: the checks of every field that a peer could fill with nonsense, so that none of it meets
arithmetic in a step: there an exception would end the engine for everybody. A front end of ours has
made most of them already (client/input_processor), with better words. Called by ``EngineCore``.
"""

from collections.abc import Sequence

from trimaran.errors import InvalidRequestError, ProtocolError
from trimaran.messages import EngineCoreRequest, ModelFacts
from trimaran.sampling_params import MAX_N, verify_text


def verify_request(request: EngineCoreRequest, facts: ModelFacts) -> None:
    """Raise InvalidRequestError naming the first field that cannot be served."""
    for field, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("prior_output_ids", request.prior_output_ids),
        ("eos_token_ids", request.eos_token_ids),
    ):
        _verify_token_ids(field, token_ids, facts.vocab_size)
    params = request.sampling_params
    params.verify()
    params.verify_for_model(facts.vocab_size)
    if params.seed is None:
        raise InvalidRequestError("the front end sets a seed", param="seed")
    for field, value, low, high in (
        ("choice_index", request.choice_index, 0, MAX_N - 1),
        ("priority", request.priority, -(1 << 31), (1 << 31) - 1),
    ):
        if not low <= value <= high:
            raise InvalidRequestError(f"{field} must be from {low} to {high}", param=field)
    if request.cache_salt is not None:
        verify_text("cache_salt", request.cache_salt)
    if request.prompt_embeds is not None:
        _verify_prompt_embeds(request, facts.hidden_size)


def _verify_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequestError(
            f"{field} has token ids outside the vocabulary (0 to {vocab_size - 1}):"
            f" from {min(token_ids)} to {max(token_ids)}",
            param=field,
        )


def _verify_prompt_embeds(request: EngineCoreRequest, hidden_size: int) -> None:
    embeds = request.prompt_embeds
    assert embeds is not None
    rows, columns = embeds.shape
    try:
        embeds.verify()
    except ProtocolError as error:
        raise InvalidRequestError(f"prompt_embeds: {error}", param="prompt_embeds") from error
    if rows != len(request.prompt_token_ids) or (hidden_size and columns != hidden_size):
        raise InvalidRequestError(
            f"prompt_embeds has {rows} rows of {columns} numbers; the prompt has"
            f" {len(request.prompt_token_ids)} tokens and the model rows of {hidden_size or 'any'}",
            param="prompt_embeds",
        )
    if request.sampling_params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs needs a prompt of tokens, not prompt_embeds", param="prompt_logprobs"
        )
