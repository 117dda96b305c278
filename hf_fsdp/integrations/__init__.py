"""The only places that touch Accelerate, Trainer, TRL and Weights & Biases."""
