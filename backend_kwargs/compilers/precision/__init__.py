"""Lower precision by consent: which there are, how a graph computes in one, and the error that is measured of it."""
