"""What researchers do with the core, and no hospital needs.

simulate/      a federation in one process: `coordinator simulate`, sweeps, `consilium.simulate`, ablations
engines/       what runs the silos of a simulation: this process, processes, Ray
demo/          `coordinator demo`: a real federation on one machine
commands.py    simulate, demo, methods, models, data split; reports.py: compare, plot; preview.py: privacy preview
comparison.py  several runs side by side; curves.py: a measure over rounds; plots.py: both as a picture
trackers.py    TensorBoard and MLflow as readers of a run
papers.py      where methods are from, what their papers claim, and what of it reproduces
datasets/      readers that only papers need
"""
