"""The configuration groups: method, data, model, federation, privacy, experiment, scale."""
