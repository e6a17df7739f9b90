"""The math of the model families, in torch. Knows tensors; never hears of a request."""
