"""Tools for research, which no hospital needs.

simulate/      a federation in one process: `coordinator simulate`, sweeps, `consilium.simulate`, ablations
engines/       run the silos of a simulation: in this process, in several, or on Ray
demo/          `coordinator demo`: a real federation on one machine
commands.py    simulate, demo, methods, models, data split; reports.py: compare, plot; preview.py: privacy preview
plots.py       plots of runs and surveys
trackers.py    log a run to TensorBoard and MLflow
datasets/      readers of data sets from papers
"""
