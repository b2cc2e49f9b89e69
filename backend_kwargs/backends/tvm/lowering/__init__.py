"""Lowering of ATen to Relax: `graph` visits the nodes, each as a `node`; `pointwise` and `reductions` convert."""
