"""Privacy, robust aggregation, and corrupted clients."""
