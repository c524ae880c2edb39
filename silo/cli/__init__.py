"""The commands of `silo`, and what they print."""
