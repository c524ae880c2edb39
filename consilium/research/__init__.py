"""What researchers do with the core, and no hospital needs.

simulate/      a federation in one process: `coordinator simulate`, sweeps, `consilium.simulate`, ablations
engines/       what runs the silos of a simulation: this process, processes, Ray
demo/          `coordinator demo`: a real federation on one machine
commands.py    simulate, demo, methods, models, data split; reports.py: compare, plot; preview.py: privacy preview
plots.py       runs and curves as a picture
trackers.py    TensorBoard and MLflow as readers of a run
datasets/      readers that only papers need
"""
