"""Ranks talking to each other, always in named phases, every failure reaching everyone."""
