"""A task at the hospital, once `silo.admission` has admitted it: `trainer` prepares a run once and does its rounds."""
