"""What a training will need, known before a GPU is rented: memory simulated on fake tensors, speed estimated."""
