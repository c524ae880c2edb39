"""The hospital's append-only account of releases.

Entries are events, chained under a key outside the file; what is admitted follows from the events alone. A change of
the tables begins in `schema.sql` and `account` (events); `event_chain` has the file's version and its migrations.
"""
