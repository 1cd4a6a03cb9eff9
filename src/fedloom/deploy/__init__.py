"""Between real machines: the same experiment, with a server and nodes as separate processes."""
