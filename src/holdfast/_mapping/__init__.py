"""Rules that lead from the tensors of a file (outside) to those of a state (inside), and back."""
