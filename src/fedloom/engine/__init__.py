"""The engine: plan, local work, exchange, evaluation, state."""
