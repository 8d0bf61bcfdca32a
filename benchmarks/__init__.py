"""Figures, not claims: each is a ratio against the backend's raw limit, measured in the same run on the same machine."""
