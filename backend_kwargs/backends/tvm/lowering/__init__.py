"""Lowering of ATen to Relax: `graph` visits the nodes; `node` and `reductions` have the converters."""
