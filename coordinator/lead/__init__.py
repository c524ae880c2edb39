"""What runs have brought, as a lead sees it. Only export needs torch; the page stands on it too.

client.py          commands to the running service
accuracy.py        what was measured, in messages: estimates with their intervals, clinical metrics
as_json.py         runs, rounds and hospitals for machines
tables.py          the same for people: tables and sentences
watcher.py         live progress of a run, with its curve
run_log.py         the events of a run and the lines of the audit log that name it, in one order
"""
