"""A lead's view of runs. Only submissions and surveys need torch; the page uses this package too.

client.py          commands to the running service
submission.py      runs that are put together and submitted
accuracy.py        measurements in messages: estimates with their intervals, clinical metrics
as_json.py         runs, rounds and hospitals for machines
tables.py          the same for people: tables and sentences
watcher.py         live progress of a run, with its curve
run_log.py         the events of a run and the lines of the audit log that name it, in one order
"""
