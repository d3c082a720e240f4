"""A federation in memory: its networks, the rows that each client is evaluated on, and the checks before the first round."""
