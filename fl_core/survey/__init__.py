"""A survey: counts of what hospitals' records are, asked before anything is trained (docs/survey.md).

facts      what a record is, read off files and rows
answers    from records to the numbers of each cell, and what of them is suppressed
program    what both sides compute: a run of one round, whose update is one sum
"""
