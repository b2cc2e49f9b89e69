"""Workloads: cases, networks and kernels of the suite, and the peers that run them."""
