"""POST /tokenize and /detokenize: what a text or a conversation is as token ids, and back."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trimaran.errors import InvalidRequestError
from trimaran.server.limits import read_json
from trimaran.server.openai.chat import encode
from trimaran.server.openai.logprobs import token_text
from trimaran.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from trimaran.server.state import ServerState

# Texts longer than the model takes may be counted too, but not without end.
_MOST_LIMITS = 8


class ServingTokenization:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._max_bytes = state.config.server.max_request_bytes

    async def tokenize(self, request: Request) -> Response:
        """Of ``prompt``, or of ``messages`` as the chat template writes them."""
        llm = self._state.serving_llm()
        body = await read_json(request, TokenizeRequest, self._max_bytes)
        self._state.check_model(body.model)
        body.check()
        adds_special = body.messages is None
        if body.add_special_tokens is not None:
            adds_special = body.add_special_tokens
        if body.messages is None:
            token_ids = await llm.encode(
                body.prompt or "",
                add_special_tokens=adds_special,
                allow_special=bool(body.allow_special_tokens),
                most_tokens=_MOST_LIMITS * llm.max_model_len,
            )
        else:
            token_ids = await encode(self._state, llm, body, add_special_tokens=adds_special)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": llm.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_text(llm.tokenizer.token_bytes(i)) for i in token_ids]
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Special tokens are written out."""
        llm = self._state.serving_llm()
        body = await read_json(request, DetokenizeRequest, self._max_bytes)
        self._state.check_model(body.model)
        if body.tokens and max(body.tokens) >= llm.vocab_size:
            raise InvalidRequestError(
                f"token id {max(body.tokens)} is outside the vocabulary"
                f" (0 to {llm.vocab_size - 1})",
                param="tokens",
            )
        text = llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
