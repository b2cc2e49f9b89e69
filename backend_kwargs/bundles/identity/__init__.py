"""Whether a module, or a graph, is the one that was compiled, in everything that its code depends on."""
