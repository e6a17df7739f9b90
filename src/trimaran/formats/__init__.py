"""Model files without torch: GGUF, safetensors, config.json, the hub cache. Bounded, untrusting."""
