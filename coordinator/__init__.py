"""The coordinator: the service that runs rounds, and the consortium's command line."""
