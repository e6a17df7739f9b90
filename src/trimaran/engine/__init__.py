"""The engine: one step after another, from requests to tokens."""
