"""A run's steps: a directory of checkpoints, one for each step that was saved."""
