"""The lead's page: `coordinator page`, a client of the running service with the lead's own certificate.

service_watch.py  the newest facts of the service, fetched while somebody looks, and kept where it does not answer
overview.py       what the first page shows: hospitals, runs, certificates
run_record.py     the closed rounds of a run, with curves and tables, computed once
run_facts.py      what the page of a run shows: curves, the open round, hospitals, failures
exports.py        downloads: the model and its card through `coordinator export`, rounds as CSV
site.py           the pages, what their buttons do
"""
