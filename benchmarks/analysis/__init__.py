"""Analysis of the records: verdicts, comparisons, reports and plots."""
