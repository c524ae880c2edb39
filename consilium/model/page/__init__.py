"""A page on loopback for an exported model: images are dropped on it, and it says what the model makes of them."""
