"""Analysis of the records: verdicts, comparisons, reports and plots.

`verdicts` says who wins by which ratio, `regressions` compares old records with new ones, `auto_choices` and
`real_models` judge `auto`; `report` writes all of it as Markdown, and `plots` draws it.
"""
