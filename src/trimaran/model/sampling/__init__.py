"""From logits to tokens: batched, and a pure function of each request's own row.

Knows logits, settings and known tokens; nothing of scheduling, KV or the model. Called by
``worker/model_runner``. What a row gets does not depend on the rows beside it: element-wise
arithmetic apart, only exact comparisons and reductions whose order is fixed are used.

Order of a request's features: logit_bias -> repetition, frequency, presence penalty ->
allowed_token_ids -> min_tokens, bad_words -> temperature -> min_p -> top_k -> top_p -> draw.
Log-probabilities are those of the model itself, before all of these.
"""
