"""Networks, one file for each family; a kind is a class with its settings as fields."""
