"""Which settings fit, which of them is fastest, and the questions beside it."""
