"""A round in other simulators: a driver for each, run in its own virtual environment and without fedloom."""
