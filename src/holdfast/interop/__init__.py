"""Where this library meets torch's own: with ``_torchformat`` the only place that may import its checkpoint package."""
