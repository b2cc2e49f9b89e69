"""How `compare` and the benchmark suite run one model several ways: what is right, each way on trial, each isolated."""
