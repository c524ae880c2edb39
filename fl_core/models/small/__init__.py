"""The papers' small networks."""
