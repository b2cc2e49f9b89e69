"""A bundle on disk, and the machine that it was built for.

`place` is the folder with its manifest and signer, `contents` saves, loads and checks the parts, also weights.
"""
