"""Training and evaluation at the hospital, after `silo.admission` admitted a run: see `trainer`."""
