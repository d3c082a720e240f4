"""NVIDIA FLARE, which carries the bytes between real sites: kits, mutual TLS, signed jobs. Only here is it imported."""
