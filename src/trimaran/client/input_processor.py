"""From a user's prompt and parameters to engine requests, with everything checked on the way.

Owns: limits of prompt and output, seeds for requests that bring none, the fan-out of n choices, bad
words as token sequences. Raises InvalidRequestError before anything is submitted. Called by
``AsyncLLM`` and ``LLMEngine``; tokenising is the caller's (it may belong on another thread).
"""

import random
import secrets

import msgspec

from trimaran.client.prompt_embeds import EmbedsPrompt, prompt_tensor
from trimaran.errors import InvalidRequestError
from trimaran.formats.checkpoint import ModelSource
from trimaran.ids import unique_id
from trimaran.messages import EngineCoreRequest, Tensor
from trimaran.sampling_params import SamplingParams, verify_text
from trimaran.text.tokenizer import Tokenizer

MAX_CACHE_SALT_CHARS = 1024


class InputProcessor:
    """Turns prompts into engine requests for one model.

    ``max_model_len`` is what the engines found, so it is set once they are ready.
    """

    def __init__(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        *,
        seed: int = -1,
    ) -> None:
        self._tokenizer = tokenizer
        self._generation = source.generation
        rows = source.architecture.vocab_size
        # An id that the model has no row for never comes, and must not be looked up.
        self._eos_token_ids = [i for i in source.generation.eos_token_ids if 0 <= i < rows]
        self._hidden_size = source.architecture.hidden_size
        # With a server seed the sequence of per-request seeds repeats from start to start; without
        # one it comes from the system. Never from the global random state.
        self._seeds = random.Random(seed) if seed >= 0 else None
        self.vocab_size = source.architecture.vocab_size
        self.max_model_len = source.architecture.max_position_embeddings

    def make_requests(
        self,
        prompt: list[int] | EmbedsPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float = 0.0,
    ) -> list[EngineCoreRequest]:
        """One request per choice. ``arrival_time``: wall seconds at which the request came in.

        Raises InvalidRequestError naming the field at fault.
        """
        prompt_token_ids, embeds = self._known(prompt)
        params.verify()
        params.verify_for_model(self.vocab_size)
        max_tokens = self._check_lengths(prompt_token_ids, params)
        if cache_salt is not None:
            if not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARS:
                raise InvalidRequestError(
                    f"cache_salt has 1 to {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
                )
            verify_text("cache_salt", cache_salt)
        if not -(1 << 31) <= priority < 1 << 31:
            raise InvalidRequestError("priority must fit 32 bits", param="priority")
        if embeds is not None and params.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs needs a prompt of tokens", param="prompt_logprobs"
            )
        params = msgspec.structs.replace(
            params, seed=self._seed() if params.seed is None else params.seed, max_tokens=max_tokens
        )
        bad_words = self._bad_words(params)
        self._check_something_is_allowed(params, bad_words)
        return [
            EngineCoreRequest(
                request_id=unique_id(),
                prompt_token_ids=prompt_token_ids,
                sampling_params=params,
                eos_token_ids=self._eos_token_ids,
                choice_index=index,
                priority=priority,
                arrival_time=arrival_time,
                bad_words_token_ids=bad_words,
                cache_salt=cache_salt,
                external_id=request_id,
                prompt_embeds=embeds,
            )
            for index in range(params.n)
        ]

    def _known(self, prompt: list[int] | EmbedsPrompt) -> tuple[list[int], Tensor | None]:
        """Token ids, which only hold places where the rows of a tensor stand for them."""
        if not isinstance(prompt, dict):
            return prompt, None
        embeds = prompt_tensor(prompt, self._hidden_size)
        return [0] * embeds.shape[0], embeds

    def _check_lengths(self, prompt: list[int], params: SamplingParams) -> int:
        limit, length = self.max_model_len, len(prompt)
        if not isinstance(prompt, list) or not all(type(token_id) is int for token_id in prompt):
            raise InvalidRequestError("a prompt is a text or a list of token ids", param="prompt")
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = min(prompt) if min(prompt) < 0 else max(prompt)
            raise InvalidRequestError(
                f"token id {bad} in the prompt is outside the vocabulary"
                f" (0 to {self.vocab_size - 1})",
                param="prompt",
            )
        asked = params.max_tokens
        if length > limit or (length == limit and asked != 0):
            raise InvalidRequestError(
                f"the prompt has {length} tokens; the model's limit is {limit} for prompt and"
                " output together",
                param="prompt",
            )
        if asked is not None:
            if length + asked > limit:
                raise InvalidRequestError(
                    f"the model's limit is {limit} tokens; the prompt has {length} and max_tokens"
                    f" asks for {asked} more",
                    param="max_tokens",
                )
            return asked
        default = self._generation.max_new_tokens or limit
        room = min(default, limit - length)
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) is above what fits ({room})", param="min_tokens"
            )
        return room

    def _check_something_is_allowed(
        self, params: SamplingParams, bad_words: list[list[int]]
    ) -> None:
        """Where only some tokens are allowed, the bans must leave one of them."""
        if params.allowed_token_ids is None:
            return
        banned = {sequence[0] for sequence in bad_words if len(sequence) == 1}
        if params.min_tokens:
            banned.update(self._eos_token_ids, params.stop_token_ids)
        if banned.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                "bad_words, or min_tokens with the tokens that end a text, ban every token of"
                " allowed_token_ids",
                param="allowed_token_ids",
            )

    def _seed(self) -> int:
        return self._seeds.getrandbits(63) if self._seeds else secrets.randbits(63)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it stands at a beginning and after a space: other tokens, same word."""
        sequences: list[list[int]] = []
        for word in params.bad_words:
            for form in (word.strip(), " " + word.strip()):
                ids = self._tokenizer.encode(form, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences
