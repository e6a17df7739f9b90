"""The OpenAI routes: completions, chat completions, models."""
