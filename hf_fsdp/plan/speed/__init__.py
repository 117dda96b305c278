"""Estimates: time of a step, traffic over links, cost, and the reserve beside the simulated memory."""
