"""Building blocks that the model families share; each reads its own weights when made."""
