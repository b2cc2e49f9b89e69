"""A bundle on disk: its folder, manifest and parts, the weights in it, and the machine that it was built for."""
