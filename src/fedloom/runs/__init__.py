"""A run: settings in, objects out, the run folder."""
