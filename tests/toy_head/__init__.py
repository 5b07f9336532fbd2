"""A kind of draft head that the project does not know: one linear layer, one draft token.

What a new head brings, and nothing else: its module and kind, an objective with an entry script,
a reader of its exports (`readers/`), and a line in the table.
"""
