"""The folder of a run: its files, saved state, scores and traffic."""
