"""Networks in plain torch with random weights, with sizes as arguments."""
