"""The hospital's append-only account of releases.

Entries are events, chained under a key outside the file. What is admitted follows from the events alone, never from
the rows beside them, which are there to be read. This is raw SQLite with triggers: nothing is ever updated in place.

A change of the tables begins in `schema.sql` and `account` (what events say, and the rows that follow); `hash_chain`
has the file's version and its list of migrations, `migration` the step that brought ledgers under the key. The chain's
key depends on the version: a new one must still be able to check what was written before.
"""
