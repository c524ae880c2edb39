"""Methods that end in a model per silo: private parts, private models, or both."""
