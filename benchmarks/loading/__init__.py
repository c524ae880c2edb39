"""How fast large images load: README.md has the question and the answer."""
