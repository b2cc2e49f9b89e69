"""The benchmark suite: kernels and models under every template and peer, next to the device's physical limit."""
