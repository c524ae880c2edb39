"""Small networks of the papers."""
