"""Many clients side by side on a GPU: operators whose kernels have an axis of lanes."""
