"""The basis of every method: trees of tensors, randomness, settings, tasks, optimizers."""
