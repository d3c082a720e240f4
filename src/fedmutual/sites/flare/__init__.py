"""Transport between real sites over NVIDIA FLARE: kits, mutual TLS, signed jobs. Only this package imports `nvflare`."""
