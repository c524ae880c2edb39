"""Commands and their output; nothing imports it."""
