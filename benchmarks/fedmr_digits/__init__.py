"""Whether FedMR pays on class-disjoint digits, and which of its losses does it."""
