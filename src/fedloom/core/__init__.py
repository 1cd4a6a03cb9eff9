"""What every method stands on: trees of tensors, randomness, settings, tasks, optimisers."""
