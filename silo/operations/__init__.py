"""Operating the hospital's service: its machine, its connection, its log, its liveness."""
