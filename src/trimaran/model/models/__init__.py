"""The model families: how the layers are wired."""
