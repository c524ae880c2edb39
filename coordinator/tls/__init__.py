"""Names the cause of refused handshakes by reading the C core log (candidate for deletion)."""
