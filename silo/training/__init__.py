"""A task at the hospital: prepare the run, check policy and budget, train."""
