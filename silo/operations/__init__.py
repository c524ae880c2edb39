"""The hospital's service seen from outside: its machine, its connection, its log, whether it lives."""
