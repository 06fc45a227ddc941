"""What all ranks write together: what one rank has, what that means for all, and who writes what."""
