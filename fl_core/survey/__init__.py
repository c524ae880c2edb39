"""A survey: counts of hospitals' records, requested before training (docs/survey.md).

facts      properties of a record, read from files and rows
answers    from records to the numbers of each cell, and their suppression
program    the computation on both sides: a run of one round, whose update is one sum
"""
