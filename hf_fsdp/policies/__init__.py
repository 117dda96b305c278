"""A section of the config becomes torch objects."""
