"""Checkpoints: saved by all ranks, committed as a whole, verified, resumed on any number of processes, exported."""
