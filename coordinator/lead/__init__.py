"""What runs have brought, as a lead sees it. Only export needs torch; the page stands on it too.

client.py          commands to the running service
accuracy.py        what was measured, in messages: estimates with their intervals, clinical metrics
as_json.py         runs, rounds and hospitals for machines
tables.py          the same for people: tables and sentences
watcher.py         live progress of a run, with its curve
curves.py          a measure of the global model over the rounds of a run
comparison.py      several runs side by side: configurations, scores, what makes them incomparable
plots.py           the same as a picture, with matplotlib
run_log.py         the events of a run and the lines of the audit log that name it, in one order
export.py          a run's model with its card; portable.py: as ONNX and as a program of plain torch
board_card.py      the signed card
page/              `coordinator page`
trackers.py        TensorBoard and MLflow as readers of a run
"""
