"""A model becomes a sharded model, and is looked at."""
