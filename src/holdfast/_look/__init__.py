"""What can be seen in checkpoints without loading them: where two differ, and the numbers of their tensors."""
