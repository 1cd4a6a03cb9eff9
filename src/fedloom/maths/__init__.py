"""The mathematics that methods share."""
