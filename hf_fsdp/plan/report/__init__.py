"""What a person gets to see of a plan: terminal, JSON, page, files."""
