"""Lowering of ATen to Relax: `graph` visits the nodes, each as a `node`; that and `reductions` convert."""
