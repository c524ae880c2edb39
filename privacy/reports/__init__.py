"""What a run will cost each hospital, what it has cost, and what noise leaves of an accuracy."""
