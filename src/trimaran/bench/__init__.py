"""Measuring: one table from one run, ours and any other OpenAI-compatible server in turn."""
