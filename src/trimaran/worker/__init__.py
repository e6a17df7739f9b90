"""How a plan becomes tensors: the persistent batch, the model's run, sampling, memory, threads."""
