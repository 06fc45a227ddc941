"""The one edge to torch's own checkpoint classes: plans, metadata, planners and storages in both shapes."""
