"""The front end's half: engine clients, output processing, AsyncLLM and LLM."""
