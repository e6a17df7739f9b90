"""How workers are reached. ``base`` is the interface; implementations are chosen by table."""
