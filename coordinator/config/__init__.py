"""From words on the command line to the frozen manifest: Hydra -> RunSpec -> manifest."""
