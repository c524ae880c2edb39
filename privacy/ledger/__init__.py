"""The hospital's append-only account of releases.

Entries are events, chained under a key outside the file; what is admitted follows from the events alone. A change of
the tables begins in `schema.sql` and `account` (events, and the rows that follow); `hash_chain` has the file's version
and its migrations, `migration` the step that brought ledgers under the key.
"""
