"""Options and where they come from: layers, templates, specs, the catalogue, and what they need.

`option` is one option with its type and check, and reads "backend:template+template"; `layers` merges those of several
sources. `templates` is the table of templates, and reads files of them (`named_values` those of packages), `catalogue`
knows Inductor's options in the installed torch, and `precisions` the lower precisions. `requirements` says what the
machine lacks, and `trust` which options are code.
"""
