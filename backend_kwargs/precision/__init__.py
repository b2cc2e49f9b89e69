"""Lower precision by consent: the table of precisions, graphs in one of them, and the measured error."""
