"""What the server counts, under the field's metric names. Knows nothing of HTTP or engines."""
