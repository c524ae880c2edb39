"""What masks cost in seconds, bytes and memory."""
