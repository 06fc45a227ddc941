"""Ranks that talk to each other in named phases; a failure reaches all of them. And what the ranks of a host share."""
