"""What is measured, and under what: cases, networks and kernels of the suite, and its peers."""
