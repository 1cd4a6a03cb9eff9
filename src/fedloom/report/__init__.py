"""Tables and pictures; reads only what a run wrote."""
