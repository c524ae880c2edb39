"""What runs have brought, as a lead sees it. Needs no torch; the page stands on it too.

curves.py          a measure of the global model over the rounds of a run
comparison.py      several runs side by side: configurations, scores, what makes them incomparable
plots.py           the same as a picture, with matplotlib
terminal_chart.py  the same in a few lines of a terminal
page/              `coordinator page`
trackers.py        TensorBoard and MLflow as readers of a run
start.py           where a run began
run_log.py         the events of a run and the lines of the audit log that name it, in one order
"""
