"""Data: what there is (sources), who has which of it (partition), and how it is held (federation)."""
