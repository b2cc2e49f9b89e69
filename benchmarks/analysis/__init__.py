"""What follows from the records: verdicts, comparisons, reports and plots."""
