"""A page on loopback that classifies dropped images with an exported model."""
