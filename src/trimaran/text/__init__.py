"""Strings to tokens and back, without torch: tokenizer, chat template, detokenizer, stop strings.

Owns everything between the text of a request and the token ids of the engine. Knows nothing of
requests, processes or HTTP; client/ and server/ call it.
"""
