"""The hospital's append-only account of releases.

Entries are events, chained under a key outside the file. Admission depends only on the events. To change the tables,
begin with `schema.sql` and `account` (events); `event_chain` has the file's version and its migrations.
"""
