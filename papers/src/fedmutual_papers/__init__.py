"""Reproduce the experiments of the papers: train each run once, store its result, and compare it with the paper."""
