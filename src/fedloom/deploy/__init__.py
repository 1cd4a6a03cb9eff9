"""Between real machines: the same experiment, with a server and nodes that are processes of their own."""
