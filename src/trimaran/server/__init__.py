"""The OpenAI-compatible HTTP server. The only package that imports the web framework."""
