"""The ranks of one host: who they are, and memory through which bytes that several want pass after one read."""
