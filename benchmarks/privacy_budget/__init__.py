"""What privacy costs on the digits: the ablation's small grid, and the search for the demo's private profile."""
