"""Differential privacy of what leaves a client: sampling, clipping, noise, accounting, and a site's budget."""
