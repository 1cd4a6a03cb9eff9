"""The tables and curves of a comparison."""
