"""The benchmark suite: kernels and models under every template and every peer, with the physical limit beside them."""
