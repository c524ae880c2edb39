"""The lead's page: `coordinator page`, a client of the running service with the lead's own certificate.

service_watch.py  the service's newest facts, fetched while a page is open, and kept if the service does not answer
overview.py       data of the first page: hospitals, runs, certificates
run_record.py     the closed rounds of a run, with curves and tables, computed once
run_facts.py      data of a run's page: curves, the open round, hospitals, failures
new_run.py        the forms that start a run
exports.py        downloads: model and card through `coordinator export`, rounds as CSV; answers to surveys
site.py           the pages and the actions of their buttons
"""
