"""Lowering of ATen to Relax: `graph` visits the nodes, of which `kernels` makes functions by the converters."""
