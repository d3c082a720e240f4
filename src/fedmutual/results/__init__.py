"""The numbers of runs: their tables, which runs are compared, gains in pairs, and the uncertainty of a mean."""
