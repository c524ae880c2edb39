"""The hospital's append-only account of releases.

Entries are events, chained under a key outside the file. What is admitted follows from the events alone, never from
the rows beside them, which are there to be read. This is raw SQLite with triggers: nothing is ever updated in place.
"""
