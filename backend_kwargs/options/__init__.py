"""Options and where they come from: layers, templates, specs, the catalogue, and what they need."""
