"""What a round costs beside the bytes that it must move."""
