"""Tables and figures; reads only what a run wrote."""
