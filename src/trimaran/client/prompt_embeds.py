"""A prompt that is embeddings instead of tokens, as users of the library give it.

Owns: the form, its checks, and the Tensor that travels. Nothing is copied where the array is
float32 and contiguous already. Called by ``input_processor``.
"""

from typing import Any, TypedDict

import numpy as np

from trimaran.errors import InvalidRequestError, PayloadTooLargeError
from trimaran.ipc.codec import MAX_BUFFER_BYTES, Buffer
from trimaran.messages import Tensor


class EmbedsPrompt(TypedDict):
    """``prompt_embeds``: numbers [P, hidden_size], one row per position: what the model's first
    layer sees, so after the family's embedding scale (Gemma multiplies by sqrt(hidden_size)).

    An array or a CPU tensor; float32 is taken as it lies in memory and must stay unchanged until
    the request has ended.
    """

    prompt_embeds: Any


Prompt = str | list[int] | EmbedsPrompt


def prompt_tensor(prompt: EmbedsPrompt, hidden_size: int) -> Tensor:
    """The checked rows. Raises InvalidRequestError, PayloadTooLargeError naming the limit."""
    try:
        if set(prompt) != {"prompt_embeds"}:
            raise ValueError(f"has the keys {sorted(map(str, prompt))}")
        array = np.ascontiguousarray(prompt["prompt_embeds"], np.dtype("<f4"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"a prompt of embeddings is {{'prompt_embeds': an array of float32}}: {error}",
            param="prompt_embeds",
            hint="a torch tensor: tensor.detach().float().cpu()",
        ) from error
    if array.ndim != 2 or array.shape[1] != hidden_size or not len(array):
        raise InvalidRequestError(
            f"prompt_embeds has the shape {list(array.shape)}; the model takes"
            f" [positions, {hidden_size}]",
            param="prompt_embeds",
        )
    if array.nbytes > MAX_BUFFER_BYTES:
        raise PayloadTooLargeError(
            f"prompt_embeds has {array.nbytes} bytes; at most {MAX_BUFFER_BYTES} are taken",
            param="prompt_embeds",
        )
    if not np.isfinite(array).all():
        raise InvalidRequestError(
            "prompt_embeds holds values that are not finite numbers", param="prompt_embeds"
        )
    return Tensor("float32", array.shape, Buffer(array))
