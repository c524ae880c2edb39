"""The federation without network, configuration files or privacy mechanisms: types, methods, models, the round loop."""
