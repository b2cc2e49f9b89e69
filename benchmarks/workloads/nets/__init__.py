"""Networks in plain torch with random weights, at the sizes that their makers are given."""
