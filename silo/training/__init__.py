"""A task at the hospital after `silo.admission` admitted it: `trainer` prepares a run once and does its rounds."""
