"""Data: where it comes from (sources), how it is split (partition), and how it is stored (federation)."""
