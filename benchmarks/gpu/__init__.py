"""All that only a GPU can say, in one command that goes on where it was: checks, throughput, the papers' runs."""
